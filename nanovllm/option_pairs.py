"""Checks of options that need or exclude each other, or have no effect on a device.

The engine loads them for some options alone.
"""

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("nanovllm")

ONE_ORDER = ("auto", "triton", "cpu")  # values of `attention_backend` that have one order of sums


def check_together(config: Any) -> None:
    """Raise for values of a Config that contradict each other."""
    if config.max_cpu_loras is not None and config.max_cpu_loras < config.max_loras:
        raise ValueError(
            f"max_cpu_loras must be at least max_loras={config.max_loras}, got"
            f" {config.max_cpu_loras}"
        )
    if config.lora_modules and not config.enable_lora:
        raise ValueError("lora_modules need enable_lora=True (--enable-lora), got False")
    if config.batch_invariant and config.attention_backend not in ONE_ORDER:
        raise ValueError(
            "batch_invariant=True needs the kernels of 'triton' or 'cpu', but attention_backend is"
            f" {config.attention_backend!r}"
        )


def log_unused(given: Mapping[str, Any], device: str) -> None:
    """Warn of given options that have no effect on a device. Scripts may have them for others."""
    unused, used = "gpu_memory_utilization", "cpu_kvcache_gib"
    if device != "cpu":
        unused, used = used, unused
    if unused in given:
        where = "CPU" if device == "cpu" else "GPU"
        logger.warning("%s has no effect on a %s; there, %s is used", unused, where, used)
