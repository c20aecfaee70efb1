"""Ranks that are threads, which exchange tensors at a barrier."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from waiting import LIMIT

from nanovllm.layers.ranks import Ranks

T = TypeVar("T")


class Meeting:
    """Where threads leave tensors for each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=LIMIT)
        self.left: list[torch.Tensor] = [torch.empty(0)] * size


class ThreadRanks(Ranks):
    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        super().__init__(rank, size)
        self.meeting = meeting

    def exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.meeting.left[self.rank] = x.clone()
        self.meeting.barrier.wait()
        everyones = list(self.meeting.left)
        self.meeting.barrier.wait()
        return everyones

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.exchange(x)).sum(0)

    def minimum(self, number: int) -> int:
        return min(int(x) for x in self.exchange(torch.tensor([number])))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        everyones = self.exchange(x)
        return torch.cat(everyones, dim=-1) if self.rank == 0 else x


@torch.inference_mode()
def on_ranks(size: int, run: Callable[[Ranks], T]) -> list[T]:
    """What `run` returns on each rank."""
    meeting = Meeting(size)

    def on_rank(rank: int) -> T:
        with torch.inference_mode():
            return run(ThreadRanks(rank, size, meeting))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(on_rank, range(size)))
