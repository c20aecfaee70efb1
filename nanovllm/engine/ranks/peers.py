"""Peers: buffers through which the ranks' GPUs sum few rows by writing to each other.

They are set up and tried when the ranks have connected. If a rank cannot use them, none does.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from nanovllm.engine.ranks.peer_memory import HANDLE_BYTES, PeerMemory
from nanovllm.kernels.triton.ranks.all_reduce import PeerKernels
from nanovllm.kernels.triton.ranks.exchange import EMPTY_HALF, REGION_BYTES, REGIONS, buffer_bytes
from nanovllm.layers.ranks import Ranks

logger = logging.getLogger("nanovllm")

PATIENCE_SECONDS = 120.0  # for the first sum: every rank compiles a kernel
POLL_SECONDS = 1e-3
TRIES = 20
LEAST_BYTES = 1 << 16  # if NCCL is faster with these, the kernels are not used
ROW = REGION_BYTES // 2  # 16-bit numbers in the longest row
CALLS = 10  # to time together
CLOCKS_FOR_LAUNCHES = 2_000_000  # about a millisecond, in which the host launches the calls

T = TypeVar("T")


class Peers:
    """The buffers of this rank and of the others. Kernels wait for other ranks, until `end`."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._memory = PeerMemory(device)
        self._ended = torch.zeros(1, dtype=torch.int32)

    def allocate(self) -> torch.Tensor:
        """Allocate the buffer. Returns all ranks' handles [R, bytes], zeros except this rank's."""
        self._ended = self._ended.pin_memory()  # kernels read it in the host's memory
        self._memory.allocate(buffer_bytes(self.size), EMPTY_HALF)
        handles = torch.zeros(self.size, HANDLE_BYTES, dtype=torch.uint8)
        handles[self.rank] = torch.tensor(list(self._memory.handle()), dtype=torch.uint8)
        return handles.to(self.device)

    def open(self, handles: torch.Tensor, kind: type[PeerKernels]) -> PeerKernels:
        """Map the other ranks' buffers. Returns the kernels that use them."""
        addresses = self._memory.open(self.rank, [bytes(each) for each in handles.tolist()])
        places = torch.tensor([*addresses, self._ended.data_ptr()], device=self.device)
        counts = torch.zeros(1 + REGIONS, dtype=torch.int32, device=self.device)
        return kind(self.rank, self.size, places, counts)

    def end(self) -> None:
        """Let kernels that wait for a rank end. Called from any thread."""
        self._ended.numpy()[0] = 1  # PyTorch refuses it outside of inference mode

    def unmap(self) -> None:
        """Unmap the other ranks' buffers."""
        self._memory.unmap()

    def close(self) -> None:
        """Free the memory. No rank may use it."""
        self._memory.close()


def connect_peers(ranks: Ranks, peers: Peers, kind: type[PeerKernels]) -> PeerKernels | None:
    """Set up the kernels, together with the other ranks. None if they do not help."""
    handles = _agreed(ranks, peers.allocate)
    if handles is None:
        return None
    handles = ranks.all_reduce(handles)
    kernels = _agreed(ranks, lambda: peers.open(handles, kind))
    if kernels is None or _agreed(ranks, lambda: _launched_alone(kernels)) is None:
        return None
    if _agreed(ranks, lambda: _tried(kernels, peers.end)) is None:
        return None
    most = _faster_bytes(ranks, kernels)
    return replace(kernels, most_bytes=most) if most else None


def _agreed(ranks: Ranks, step: Callable[[], T]) -> T | None:
    """The result of the step; None if it raises on any rank."""
    result: T | None = None
    reason: Exception | str = "another rank cannot use them"
    try:
        result = step()
    except Exception as error:
        reason = error
    if ranks.minimum(int(result is not None)):
        return result
    logger.warning("NCCL makes all sums, without kernels between GPUs: %s", reason)
    return None


def _launched_alone(kernels: PeerKernels) -> torch.Tensor:
    """Launch a sum without other ranks, so that a kernel that fails does so before ranks wait.

    A single rank reads no buffer, so any address will do.
    """
    alone = replace(kernels, rank=0, size=1, places=kernels.places[-2:])
    total = alone.all_reduce(torch.ones(2, 64, device=kernels.places.device)).cpu()
    kernels.counts.zero_()
    return total


def _tried(kernels: PeerKernels, end: Callable[[], None]) -> PeerKernels:
    """Sum rows over the ranks a few times; a RuntimeError if a sum is wrong or takes too long."""
    device = kernels.places.device
    rows = torch.arange(float(ROW), device=device).remainder_(127).expand(REGIONS, -1)
    rows = rows.to(torch.bfloat16)
    totals = [
        kernels.all_reduce(rows[:, : ROW >> i % 4] * (kernels.rank + 1)) for i in range(TRIES)
    ]
    stream, deadline = torch.cuda.current_stream(), time.monotonic() + PATIENCE_SECONDS
    while not stream.query():
        if time.monotonic() > deadline:
            end()
            raise RuntimeError("what other GPUs write does not arrive")
        time.sleep(POLL_SECONDS)
    addends = [rows * (rank + 1) for rank in range(kernels.size)]
    expected = torch.stack([addend.float() for addend in addends]).sum(dim=0).bfloat16()
    if not all(torch.equal(total, expected[:, : total.shape[1]]) for total in totals):
        raise RuntimeError("a sum over GPUs is wrong")
    return kernels


def _faster_bytes(ranks: Ranks, kernels: PeerKernels) -> int:
    """The most bytes with which the kernels are faster than NCCL, in steps of 4; 0 for none."""
    most = kernels.most_bytes
    while most >= LEAST_BYTES:
        num_rows = max(1, most // ((kernels.size - 1) * 2 * ROW))
        x = torch.zeros(num_rows, ROW, dtype=torch.bfloat16, device=kernels.places.device)
        ours, nccls = _milliseconds(kernels.all_reduce, x), _milliseconds(ranks.all_reduce, x)
        logger.debug("sums of %d x %d: %.3f ms, by NCCL %.3f", num_rows, ROW, ours, nccls)
        if ranks.minimum(int(ours < nccls)):
            return most
        most //= 4
    logger.info("NCCL makes all sums: here it is faster than kernels between GPUs")
    return 0


def _milliseconds(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    """How long one call takes on the device, without waiting for the host."""
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    call(x)
    torch.cuda._sleep(CLOCKS_FOR_LAUNCHES)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(CALLS):
        call(x)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / CALLS
