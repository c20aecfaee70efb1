"""Copies between host and device that do not block. On the CPU nothing is copied."""

from typing import Any, TypeVar

import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
T = TypeVar("T")


def upload(array: Array, device: torch.device) -> torch.Tensor:
    """A copy on the device, made in the order of the device's work."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def upload_all(value: T, device: torch.device) -> T:
    """A dataclass, a tuple or a list (of these), with its CPU tensors uploaded.

    The copies run while the device still computes steps that were launched before.
    """
    if device.type == "cpu":
        return value
    from nanovllm.engine.run.upload_stream import upload_ahead_of_work

    return upload_ahead_of_work(value, device)


def upload_ahead(device: torch.device, *arrays: Array) -> list[torch.Tensor]:
    """Copies of arrays, as `upload_all` makes them."""
    return upload_all([*map(torch.from_numpy, arrays)], device)


def download(x: torch.Tensor) -> torch.Tensor:
    """A copy on the host, complete when the device has run it; the tensor itself on the CPU."""
    if x.device.type == "cpu":
        return x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)
