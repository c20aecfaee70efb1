"""Where and in what type a model runs, from what was asked and what is there."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from nanovllm.kernels.cpu.packed_linear import cpu_computes
from nanovllm.layers.ranks import ALONE, Ranks


def resolve_device(device: str, ranks: Ranks = ALONE) -> torch.device:
    """Turn `Config.device` into a device that is there; ranks take GPUs that follow each other."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not device.startswith("cuda"):
        return torch.device(device)
    if not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but PyTorch finds no CUDA device here; use 'cpu'")
    index = int(device.partition(":")[2] or torch.cuda.current_device())
    last, there = index + ranks.size - 1, torch.cuda.device_count()
    if last >= there:
        raise ValueError(
            f"device={device!r} and tensor_parallel_size={ranks.size} need 'cuda:{last}', but there"
            f" are {there} devices: from {index} on, {max(there - index, 0)} ranks fit"
        )
    return torch.device("cuda", index + ranks.rank)


def resolve_dtype(dtype: str, model_dtype: str, device: torch.device) -> torch.dtype:
    """Turn `Config.dtype` into a type; "auto" is the model's own where the device is fit for it."""
    resolved: torch.dtype = getattr(torch, model_dtype if dtype == "auto" else dtype)
    if dtype == "auto" and device.type == "cpu" and not cpu_computes(resolved):
        return torch.float32
    return resolved


@contextmanager
def computing_on(device: torch.device, num_threads: int | None = None) -> Iterator[None]:
    """What holds while the engine computes, whatever the caller has set up around it.

    No gradients, no autocast; `device` is PyTorch's current one, where Triton launches; and no more
    than `num_threads` CPU threads, where there are others to share the cores with.
    """
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    before = torch.get_num_threads()
    with torch.inference_mode(), torch.autocast(device.type, enabled=False), current:
        if num_threads is None or num_threads == before:
            yield
            return
        torch.set_num_threads(num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
