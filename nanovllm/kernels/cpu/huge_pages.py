"""Memory for weights in pages of 2 MiB, which the processor reads up to 1.4 times as fast.

With pages of 4 KiB, the processor looks up many addresses, and prefetches only within a page. Linux
uses huge pages for memory that a program asks them for, unless the system forbids it. On other
systems, and where they are forbidden, this is ordinary memory.
"""

import contextlib
import ctypes
import math
import mmap
import weakref

import torch

HUGE = 1 << 21
COLLAPSE = 25  # MADV_COLLAPSE, of Linux 6.1 and newer
WASTE = 16  # a tensor may take up to this part of its size more
MOST_MAPS = 4096  # of a process, which may have 65,530; each of ours is divided into up to three

_maps: "weakref.WeakSet[mmap.mmap]" = weakref.WeakSet()  # in use


def empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor. Its end is in small pages if a huge one would be too large for it."""
    size = math.prod(shape) * dtype.itemsize
    whole = (size + min(HUGE - 1, size // WASTE)) // HUGE * HUGE  # bytes in huge pages
    if not whole or not hasattr(mmap, "MADV_HUGEPAGE") or len(_maps) >= MOST_MAPS:
        return torch.empty(shape, dtype=dtype)
    # Not touched: only addresses. A tensor keeps the memory that it was made of.
    memory = mmap.mmap(-1, max(whole, size) + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _maps.add(memory)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE
    with contextlib.suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
    count = size // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)


def contiguous(values: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, in huge pages."""
    return empty(values.shape, values.dtype).copy_(values)


def collapse(values: torch.Tensor) -> None:
    """Replace the small pages of a tensor's memory, which keeps its address and its values.

    Linux before 6.1 does so later, by and by.
    """
    start = -(-values.data_ptr() // HUGE) * HUGE
    size = (values.data_ptr() + values.nbytes) // HUGE * HUGE - start
    if size > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        advise = ctypes.CDLL(None).madvise
        for advice in (mmap.MADV_HUGEPAGE, COLLAPSE):
            advise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)
