"""The process's heap."""

import contextlib
import ctypes


def trim_heap() -> None:
    """Return free memory to the system, where the C library is glibc.

    It keeps much of what was freed, in a heap for each thread, and loading a model frees a lot.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
