"""Where and in what type a model runs, from what was asked and what is there."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from nanovllm.kernels.packed_linear import cpu_computes


def resolve_device(device: str) -> torch.device:
    """Turn `Config.device` into a device that is there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not device.startswith("cuda"):
        return torch.device(device)
    if not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but PyTorch finds no CUDA device here; use 'cpu'")
    index = int(device.partition(":")[2] or torch.cuda.current_device())
    if index >= torch.cuda.device_count():
        raise ValueError(f"device={device!r}, but there are {torch.cuda.device_count()} devices")
    return torch.device("cuda", index)


def resolve_dtype(dtype: str, model_dtype: str, device: torch.device) -> torch.dtype:
    """Turn `Config.dtype` into a type; "auto" is the model's own where the device is fit for it."""
    resolved: torch.dtype = getattr(torch, model_dtype if dtype == "auto" else dtype)
    if dtype == "auto" and device.type == "cpu" and not cpu_computes(resolved):
        return torch.float32
    return resolved


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current one: Triton launches where PyTorch's current device is."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
