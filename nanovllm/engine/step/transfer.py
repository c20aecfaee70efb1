"""Between host and device, without waiting. On the CPU nothing is copied."""

import functools
from typing import Any

import numpy.typing as npt
import torch

Array = npt.NDArray[Any]


def upload(array: Array, device: torch.device) -> torch.Tensor:
    """A copy on the device, made in the order of its work."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_ahead(device: torch.device, *arrays: Array) -> list[torch.Tensor]:
    """Copies on the device, made while it still computes what was launched before.

    They go by a stream of their own, whose event the current stream waits for before it goes on.
    Two more events guard what is copied from and to: PyTorch hands the pinned memory out again when
    the copy is done, and the device's when the current stream has come past the last use.
    """
    if device.type == "cpu":
        return [upload(array, device) for array in arrays]
    stream, current = _upload_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        tensors = [upload(array, device) for array in arrays]
    current.wait_stream(stream)
    for tensor in tensors:
        tensor.record_stream(current)
    return tensors


def download(x: torch.Tensor) -> torch.Tensor:
    """A copy on the host that is made when the device gets there; the tensor itself on the CPU."""
    if x.device.type == "cpu":
        return x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


@functools.cache
def _upload_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
