"""What this machine's processor is, and which products it is good at."""

import functools
import platform
from pathlib import Path

FEATURES = ("flags", "Features")  # by processor: x86, ARM


@functools.cache
def cpu_info() -> dict[str, str]:
    """The lines of /proc/cpuinfo for the first core, by name; no lines on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in reversed(lines))
    return {name.strip(): value.strip() for name, _, value in pairs if value}


def description() -> str:
    """All that `-march=native` depends on: several kinds of machine may share a home."""
    names = ("model name", *FEATURES, "CPU implementer", "CPU part")
    return "\n".join([platform.machine(), *(cpu_info().get(name, "") for name in names)])


def float32_is_fastest() -> bool:
    """Whether no other type's products are faster than float32's, on a processor with AVX2.

    AMX multiplies bfloat16 faster, and so do AMD's vector units. Intel's take as long as for two
    products of float32, and converting is free.
    """
    flags = cpu_info().get("flags", "").split()
    has_fast_bf16 = "amx_bf16" in flags or (
        "avx512_bf16" in flags and cpu_info().get("vendor_id") == "AuthenticAMD"
    )
    return {"avx2", "fma"} <= set(flags) and not has_fast_bf16
