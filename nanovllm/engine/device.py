"""Where and in what type a model runs, from what was asked and what is there."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

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


@contextmanager
def computing_on(device: torch.device) -> Iterator[None]:
    """What holds while the engine computes, whatever the caller has set up around it.

    No gradients, no autocast; and `device` is PyTorch's current one, where Triton launches.
    """
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with torch.inference_mode(), torch.autocast(device.type, enabled=False), current:
        yield
