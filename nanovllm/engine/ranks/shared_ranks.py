"""Ranks that exchange tensors on the CPU, through memory that their processes share.

The memory is an unnamed file, which rank 0 creates and the others inherit: a counter for each rank,
and two buffers with a slot for each rank. Tensors larger than a slot are exchanged in pieces.
Exchanges are numbered. In exchange e, a rank

1. writes its slot in buffer e % 2,
2. sets its counter to e,
3. waits until all counters are e or more,
4. reads buffer e % 2.

One wait for each exchange is enough. A rank that writes in exchange e + 2 reuses the buffer of
exchange e. It has waited in exchange e + 1 until all counters were e + 1 or more, and a rank sets
its counter to e + 1 only after it has read the buffer of exchange e.
"""

import os
import time
from typing import Any

import numpy as np
import torch

from nanovllm.engine.ranks.channel import CACHE_LINE, fence
from nanovllm.engine.ranks.process_ranks import Check, ProcessRanks, no_check
from nanovllm.engine.ranks.spin import Spin

SLOT_BYTES = 1 << 19  # with two ranks, both buffers take 2 MiB
SPLIT_BYTES = 1 << 17  # from here on, each of three or more ranks adds up a part
SPIN_SECONDS = 2e-3  # how long to poll for another rank before sleeping, at most
NAP_SECONDS = 1e-4


def memory_bytes(size: int) -> int:
    """The size of the shared memory of `size` ranks."""
    return size * (CACHE_LINE + 2 * SLOT_BYTES)


class SharedRanks(ProcessRanks):
    """One process of `size`, with tensors on the CPU. `address` is the memory's file descriptor.

    The results are bitwise equal on all ranks. A wait calls `check`, which raises if another rank
    has ended. Invariant: all counters are e or e + 1 for some e.
    """

    def __init__(
        self, rank: int, size: int, address: int | None = None, check: Check = no_check
    ) -> None:
        fd = make_memory(size) if address is None else address
        super().__init__(rank, size, fd, (fd,), check)
        file = f"/proc/self/fd/{fd}"
        memory = torch.from_file(file, shared=True, size=memory_bytes(size), dtype=torch.uint8)
        counters, self._data = memory[: size * CACHE_LINE], memory[size * CACHE_LINE :]
        columns = counters.numpy().view("int64").reshape(size, -1)[:, :1]
        self._counter = columns[rank]
        self._others = [columns[other] for other in range(size) if other != rank]
        self._slots: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self._spin = Spin(SPIN_SECONDS)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' x, added in the order of ranks, and rounded once."""
        x = x.contiguous()
        room = SLOT_BYTES // x.element_size()
        room -= room % self.size
        for start in range(0, x.numel(), room):
            piece = x.view(-1)[start : start + room]
            is_large = self.size > 2 and piece.nbytes >= SPLIT_BYTES
            if is_large and len(piece) % self.size == 0:
                self._add_up_split(piece)
            else:
                add_up(self._exchange(piece), piece)
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        room = SLOT_BYTES // x.element_size()
        for start in range(0, x.numel(), room):
            piece = x.view(-1)[start : start + room]
            piece.copy_(self._exchange(piece)[0])
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        length, width = rows.shape
        whole = x.new_empty(length, self.size if self.rank == 0 else 0, width)
        room = SLOT_BYTES // x.element_size()
        columns = min(width, room)
        for top in range(0, length, room // columns):
            for left in range(0, width, columns):
                block = slice(top, top + room // columns), slice(left, left + columns)
                parts = self._exchange(rows[block].reshape(-1))
                for target, part in zip(whole.unbind(1), parts, strict=False):
                    target[block] = part.view(target[block].shape)
        return whole.view(*x.shape[:-1], -1) if self.rank == 0 else x

    def minimum(self, number: int) -> int:
        return min(int(part) for part in self._exchange(torch.tensor([number])))

    def close(self) -> None:
        self._slots.clear()
        del self._data, self._counter, self._others
        os.close(self.address)

    def _add_up_split(self, piece: torch.Tensor) -> None:
        """Replace `piece` by the sum over all ranks; each rank adds up one part of it."""
        parts = piece.view(self.size, -1)
        addends = [other.view(self.size, -1)[self.rank] for other in self._exchange(piece)]
        add_up(addends, parts[self.rank])
        for part, total in zip(parts, self._exchange(parts[self.rank]), strict=True):
            part.copy_(total)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return all ranks' x, valid until the next exchange. x is flat and fits into a slot."""
        number = int(self._counter[0]) + 1
        slots = [slot[: len(x)] for slot in self._slots_of(x.dtype)[number % 2]]
        slots[self.rank].copy_(x)
        fence()  # finish this exchange's write and the last one's reads before the counter is set
        self._counter[0] = number
        for other in self._others:
            if other[0] < number:
                self._wait(other, number)
        fence()  # read the counters before the slots
        return slots

    def _wait(self, other: np.ndarray[Any, Any], number: int) -> None:
        until = self._spin.begin()
        while other[0] < number:
            if time.perf_counter() < until:
                os.sched_yield()  # ranks may outnumber cores
            else:
                self.check()
                time.sleep(NAP_SECONDS)
        self._spin.end()

    def _slots_of(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """The slots of both buffers, as flat tensors of `dtype`."""
        if dtype not in self._slots:
            buffers = self._data.view(dtype).view(2, self.size, -1)
            self._slots[dtype] = [list(buffer.unbind()) for buffer in buffers.unbind()]
        return self._slots[dtype]


def make_memory(size: int) -> int:
    """Create the memory of `size` ranks, an unnamed file of zeros."""
    fd = os.memfd_create("nanovllm")
    os.ftruncate(fd, memory_bytes(size))
    return fd


def add_up(parts: list[torch.Tensor], total: torch.Tensor) -> None:
    """Write the sum of `parts` to `total`: added in order, in float32 if their type is shorter."""
    first, second, *others = parts
    if not others or total.dtype not in (torch.bfloat16, torch.float16):
        torch.add(first, second, out=total)  # computes in float32 too
        for part in others:
            total.add_(part)
        return
    accurate = first.float()
    for part in parts[1:]:
        accurate.add_(part)
    total.copy_(accurate)
