"""Measure this machine's two rates, from which the roofline is computed."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanovllm.bench.roofline import Machine
from nanovllm.engine.start.placement import Placement
from nanovllm.formats.dummy_values import dummy_values
from nanovllm.formats.format import DENSE, WeightFormat
from nanovllm.kernels.cpu import huge_pages
from nanovllm.layers.linear import ReplicatedLinear

MATMUL_SIZES = {"cuda": 8192, "cpu": 2048}  # inputs, outputs and rows


def median_seconds(call: Callable[[], Any], device: torch.device, samples: int = 7) -> float:
    """Median time of `call`. On CUDA a sample is many calls, which hides their launch times."""
    calls = 20 if device.type == "cuda" else 1
    seconds = []
    for _ in range(1 + samples):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - start) / calls)
    return statistics.median(seconds[1:])  # the first sample warms up


def copy_rate(device: torch.device) -> float:
    """Bytes read and written per second by a copy that is larger than a GPU's caches."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device)


def read_rate() -> float:
    """Bytes per second that a CPU reads for a large sum. Decoding, too, hardly writes.

    The numbers are in huge pages, as weights are.
    """
    values = huge_pages.empty((1 << 26,), torch.int64).fill_(1)
    return values.nbytes / median_seconds(values.sum, values.device)


@torch.inference_mode()
def matmul_rate(placement: Placement, weight_format: WeightFormat = DENSE) -> float:
    """FLOPs per second of a large linear layer, computed by the model's own code."""
    device, size = placement.device, MATMUL_SIZES[placement.device.type]
    previous = torch.get_default_dtype()
    torch.set_default_dtype(placement.dtype)
    try:
        with torch.device(device):
            linear = ReplicatedLinear(size, size, weight_format=weight_format)
    finally:
        torch.set_default_dtype(previous)
    generator = torch.Generator(device=device).manual_seed(0)
    for param in linear.parameters():
        values = dummy_values(param, generator)
        assert values is not None
        linear.weight_loader(param, values, None)
    linear.bind(placement.backend)
    x = torch.randn(size, size, dtype=placement.dtype, device=device)
    return 2 * size**3 / median_seconds(lambda: linear(x), device)


def measure_machine(placement: Placement, weight_format: WeightFormat = DENSE) -> Machine:
    """Measure both rates, and free the memory that was used.

    CPU ranks share one machine. Each CUDA rank has a GPU, assumed to be as fast as the first.
    """
    device, num_devices = placement.device, placement.ranks.size
    flops = matmul_rate(placement, weight_format)
    if device.type == "cpu":
        return Machine(read_rate(), flops)
    machine = Machine(copy_rate(device) * num_devices, flops * num_devices)
    torch.cuda.empty_cache()
    return machine


def machine_name() -> str:
    """The processor's name and its number of cores."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"
