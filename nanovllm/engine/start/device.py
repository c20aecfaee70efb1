"""The device and the data type of a model, from the options and the hardware."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from nanovllm.kernels.operands.kv_layer import CODES
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.utils.cores import allowed_cores


def resolve_device(device: str, ranks: Ranks = ALONE) -> torch.device:
    """Resolve `Config.device` to an existing device. Ranks use consecutive GPUs."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not device.startswith("cuda"):
        return torch.device(device)
    if not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but PyTorch finds no CUDA device; use 'cpu'")
    index = int(device.partition(":")[2] or torch.cuda.current_device())
    last, num_devices = index + ranks.size - 1, torch.cuda.device_count()
    if last >= num_devices:
        raise ValueError(
            f"device={device!r} and tensor_parallel_size={ranks.size} need 'cuda:{last}', but there"
            f" are {num_devices} devices: from {index} on, {max(num_devices - index, 0)} ranks fit"
        )
    return torch.device("cuda", index + ranks.rank)


def resolve_dtype(dtype: str, model_dtype: str, device: torch.device) -> torch.dtype:
    """Resolve `Config.dtype`; "auto" is the model's own type, or float32 on a CPU without it."""
    resolved: torch.dtype = getattr(torch, model_dtype if dtype == "auto" else dtype)
    if dtype != "auto" or device.type != "cpu":
        return resolved
    from nanovllm.kernels.cpu import processor

    return resolved if processor.products().computes(resolved) else torch.float32


def resolve_kv_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """Resolve `Config.kv_cache_dtype` for a model of type `dtype`."""
    return dtype if kv_cache_dtype == "auto" else CODES


def threads_of_rank(size: int) -> int:
    """The CPU threads of each of `size` ranks: all that PyTorch uses here, and a quota allows."""
    return max(1, min(torch.get_num_threads(), allowed_cores()) // size)


@contextmanager
def computing_on(device: torch.device, num_threads: int | None = None) -> Iterator[None]:
    """PyTorch's settings while the engine computes, independent of the caller's.

    No gradients and no autocast. `device` is the current device: Triton launches on that. With
    `num_threads`, PyTorch and our kernels use that many CPU threads.
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
