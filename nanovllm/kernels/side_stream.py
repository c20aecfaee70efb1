"""Run two computations at the same time on a GPU, one of them on a second stream."""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

First = TypeVar("First")
Second = TypeVar("Second")


def overlapped(
    device: torch.device, first: Callable[[], First], second: Callable[[], Second]
) -> tuple[First, Second]:
    """Call both functions and return both results. In a CUDA graph, their kernels run in parallel.

    Outside of a graph they run one after the other, because launches on a second stream take the
    host longer than the kernels run.
    """
    if device.type != "cuda":
        return first(), second()
    side = _side_stream(device)  # made before a graph is captured
    if not torch.cuda.is_current_stream_capturing():
        return first(), second()
    current = torch.cuda.current_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        later = second()
    now = first()
    current.wait_stream(side)
    return now, later


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
