"""Peers: the GPUs of the other ranks, which write to a buffer of this rank's for sums of few rows.

They are set up when the ranks have connected, and tried. If a rank cannot use them, none does.
"""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from nanovllm.engine.ranks.peer_memory import HANDLE_BYTES, PeerMemory
from nanovllm.kernels.triton.all_reduce import PeerKernels
from nanovllm.kernels.triton.exchange import EMPTY_HALF, REGIONS, buffer_bytes
from nanovllm.layers.ranks import Ranks

logger = logging.getLogger("nanovllm")

PATIENCE_SECONDS = 20.0  # for the first sum: every rank compiles a kernel
POLL_SECONDS = 1e-3
TRIES = 20

T = TypeVar("T")


class Peers:
    """The buffers of this rank and of the others. Kernels wait for the ranks until `end`."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._memory = PeerMemory(device)
        self._ended = torch.zeros(1, dtype=torch.int32).pin_memory()  # kernels read it there

    def allocate(self) -> torch.Tensor:
        """Allocate the buffer. Returns all ranks' handles [R, bytes], zeros except this rank's."""
        self._memory.allocate(buffer_bytes(self.size), EMPTY_HALF)
        handles = torch.zeros(self.size, HANDLE_BYTES, dtype=torch.uint8)
        handles[self.rank] = torch.tensor(list(self._memory.handle()), dtype=torch.uint8)
        return handles.to(self.device)

    def open(self, handles: torch.Tensor) -> PeerKernels:
        """Map the other ranks' buffers. Returns the kernels that use them."""
        addresses = self._memory.open(self.rank, [bytes(each) for each in handles.tolist()])
        places = torch.tensor([*addresses, self._ended.data_ptr()], device=self.device)
        counts = torch.zeros(REGIONS, dtype=torch.int32, device=self.device)
        return PeerKernels(self.rank, self.size, places, counts)

    def end(self) -> None:
        """Let kernels that wait for a rank end. Called from any thread."""
        self._ended.fill_(1)

    def close(self) -> None:
        """Free the memory, which no rank uses any more."""
        self._memory.close()


def connect_peers(ranks: Ranks, peers: Peers) -> PeerKernels | None:
    """Set up the kernels, together with the other ranks. None where they do not work."""
    handles = _agreed(ranks, peers.allocate)
    if handles is None:
        return None
    handles = ranks.all_reduce(handles)
    sums = _agreed(ranks, lambda: peers.open(handles))
    if sums is None or _agreed(ranks, lambda: _launched_alone(sums)) is None:
        return None
    return _agreed(ranks, lambda: _tried(sums, peers.end))


def _agreed(ranks: Ranks, step: Callable[[], T]) -> T | None:
    """What the step returns; None if it raises on any rank."""
    result: T | None = None
    try:
        result = step()
    except Exception as error:
        logger.warning("NCCL sums all rows, as GPUs do not share memory: %s", error)
    return result if ranks.minimum(int(result is not None)) else None


def _launched_alone(sums: PeerKernels) -> torch.Tensor:
    """A sum that waits for no rank: what raises for other reasons does so before others wait."""
    alone = PeerKernels(0, 1, sums.places[-2:], sums.counts)
    total = alone.all_reduce(torch.ones(2, 64, device=sums.places.device)).cpu()
    sums.counts.zero_()
    return total


def _tried(sums: PeerKernels, end: Callable[[], None]) -> PeerKernels:
    """Sum rows over the ranks a few times; a RuntimeError if that is wrong or takes too long."""
    numbers = torch.arange(1024.0, device=sums.places.device).expand(REGIONS, -1).contiguous()
    totals = [sums.all_reduce(numbers * (sums.rank + 1)) for _ in range(TRIES)]
    stream, deadline = torch.cuda.current_stream(), time.monotonic() + PATIENCE_SECONDS
    while not stream.query():
        if time.monotonic() > deadline:
            end()
            raise RuntimeError("what other GPUs write does not arrive")
        time.sleep(POLL_SECONDS)
    expected = numbers * (sums.size * (sums.size + 1) // 2)
    if not all(torch.equal(total, expected) for total in totals):
        raise RuntimeError("a sum over GPUs is wrong")
    return sums
