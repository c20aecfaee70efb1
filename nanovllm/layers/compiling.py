"""Compile many Triton kernels at the same time, before the calls that launch them."""

import os
from collections.abc import Callable

import torch

from nanovllm.utils.resources import allowed_cores

MOST_THREADS = 16  # a start compiles about 40 kernels, and the slowest takes a sixth of the time


def compile_in_threads(call: Callable[[], object], device: torch.device) -> None:
    """Compile the Triton kernels that `call` launches on a GPU, in a dry run of it.

    It does nothing on other devices. A compiler's error is raised by the kernel's first launch.
    """
    if device.type != "cuda":
        return
    try:
        from nanovllm.kernels.triton.dry_run import dry_run
    except ImportError:  # no Triton
        return
    has_list = hasattr(os, "sched_getaffinity")  # on Linux
    cores = len(os.sched_getaffinity(0)) if has_list else os.cpu_count() or 1
    dry_run(call, min(MOST_THREADS, allowed_cores(), cores), device)
