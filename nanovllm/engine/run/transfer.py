"""Copies between host and device that do not wait. On the CPU nothing is copied."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
T = TypeVar("T")


def upload(array: Array, device: torch.device) -> torch.Tensor:
    """A copy on the device, made in the order of its work."""
    return _upload(torch.from_numpy(array), device)


def _upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_all(value: T, device: torch.device) -> T:
    """A dataclass, a tuple or a list (of these), with its CPU tensors uploaded.

    They are copied while the device still computes what was launched before. Two events guard the
    memory: PyTorch reuses the pinned memory only after the copy, and the device's memory only after
    the current stream's last use.
    """
    if device.type == "cpu":
        return value
    current = torch.cuda.current_stream(device)

    def upload_one(tensor: torch.Tensor) -> torch.Tensor:
        uploaded = _upload(tensor, device)
        uploaded.record_stream(current)
        return uploaded

    with uploading(device):
        uploaded: T = with_tensors(value, upload_one)
    return uploaded


@contextmanager
def uploading(device: torch.device, after: torch.cuda.Event | None = None) -> Iterator[None]:
    """A block that uploads while the device still computes what was launched before.

    Its copies use a stream of their own, for which the current stream waits before it goes on. They
    begin after the work before the event `after`.
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


def upload_ahead(device: torch.device, *arrays: Array) -> list[torch.Tensor]:
    """Copies of arrays, as `upload_all` makes them."""
    return upload_all([*map(torch.from_numpy, arrays)], device)


def download(x: torch.Tensor) -> torch.Tensor:
    """A copy on the host, complete when the device has come to it; the tensor itself on the CPU."""
    if x.device.type == "cpu":
        return x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


@functools.cache
def _upload_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
