"""Uploads to a GPU on a separate stream, while it still computes earlier steps."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def upload_ahead_of_work(value: T, device: torch.device) -> T:
    """A dataclass, a tuple or a list (of these), with its CPU tensors uploaded.

    Two events guard the memory: PyTorch reuses the pinned memory only after the copy, and the
    device's memory only after the current stream's last use.
    """
    current = torch.cuda.current_stream(device)

    def upload_one(tensor: torch.Tensor) -> torch.Tensor:
        uploaded = tensor.pin_memory().to(device, non_blocking=True)
        uploaded.record_stream(current)
        return uploaded

    with uploading(device):
        uploaded: T = with_tensors(value, upload_one)
    return uploaded


@contextmanager
def uploading(device: torch.device, after: torch.cuda.Event | None = None) -> Iterator[None]:
    """A block that uploads while the device still computes steps that were launched before.

    The copies run on a separate stream, and the current stream waits for them at the block's end.
    They begin after the event `after`.
    """
    if device.type == "cpu":
        yield
        return
    stream, current = _upload_stream(device), torch.cuda.current_stream(device)
    if after is not None:
        stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of a dataclass, a tuple or a list (of these) with its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        items = [with_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        parts = {name: with_tensors(getattr(value, name), change) for name in names}
        return dataclasses.replace(value, **parts)
    return value


@functools.cache
def _upload_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
