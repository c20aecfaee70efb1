"""The process's heap."""

import contextlib
import ctypes
import gc


def trim_heap() -> None:
    """Return free memory to the system, where the C library is glibc.

    It keeps much of what was freed, in a heap for each thread, and loading a model frees a lot.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def keep_what_lives() -> None:
    """Exclude the objects of now from garbage collection, which stops all threads for 0.1 s.

    For processes of our own: a caller's objects may still become garbage.
    """
    gc.collect()
    gc.freeze()
