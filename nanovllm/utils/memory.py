"""Memory of this process: its heap, and sizes as texts."""

import contextlib
import ctypes
import gc

MIB, GIB = 1 << 20, 1 << 30


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


def memory_text(num_bytes: float) -> str:
    """A number of bytes in GiB, or in MiB if it is small."""
    if num_bytes < GIB / 10:
        return f"{num_bytes / MIB:,.1f} MiB"
    return f"{num_bytes / GIB:,.3f} GiB"
