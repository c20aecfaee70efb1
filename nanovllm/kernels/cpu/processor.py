"""Find this machine's processor, and the plain matrices that our kernels multiply fastest on it.

`tiled_types`, `onednn_has_amx` and `multiplies_bytes` make all choices of Python that depend on the
processor. Compilers make those of C++.
"""

import functools
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from nanovllm.kernels.plain import packed_linear

FEATURES = ("flags", "Features")  # by processor: x86, ARM


@functools.cache
def cpu_info() -> dict[str, str]:
    """The lines of /proc/cpuinfo for the first core, by name; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in reversed(lines))
    return {name.strip(): value.strip() for name, _, value in pairs if value}


def description() -> str:
    """The processor as `-march=native` sees it; machines that share a home may differ in it."""
    names = ("model name", *FEATURES, "CPU implementer", "CPU part")
    return "\n".join([platform.machine(), *(cpu_info().get(name, "") for name in names)])


@functools.cache
def tiled_types() -> frozenset[torch.dtype]:
    """The types of plain matrices that `tiled_linear` multiplies faster than PyTorch here.

    oneDNN's own choice follows ONEDNN_MAX_CPU_ISA. Callers read this function from the module, so
    that tests can replace it.
    """
    return types_to_tile(cpu_info(), packed_linear.packed_types())


def types_to_tile(
    info: Mapping[str, str], packed: frozenset[torch.dtype]
) -> frozenset[torch.dtype]:
    """The same for a processor with these lines of /proc/cpuinfo, where oneDNN has `packed`.

    Our kernels multiply bfloat16 with AMX, else in float32, with AVX2. oneDNN's bfloat16 is faster
    with AMD's vector units. Intel's vector units take as long for it as for two products of
    float32, and converting is free.
    """
    flags = set(info.get("flags", "").split())
    if not {"avx2", "fma"} <= flags or (has_fast_vectors(info) and torch.bfloat16 in packed):
        return frozenset()
    return frozenset((torch.float32, torch.bfloat16))


def has_fast_vectors(info: Mapping[str, str]) -> bool:
    """Whether vectors multiply bfloat16 faster than float32: AMD's do."""
    flags = info.get("flags", "").split()
    return "avx512_bf16" in flags and info.get("vendor_id") == "AuthenticAMD"


def onednn_has_amx() -> bool:
    """Whether oneDNN multiplies bfloat16 by AMX, Intel's unit for products of small matrices.

    Our library has AMX only if its compiler knows it, and the system permits it.
    """
    has_unit = "amx_bf16" in cpu_info().get("flags", "").split()
    return has_unit and torch.bfloat16 in packed_linear.packed_types()


@functools.cache
def multiplies_bytes() -> bool:
    """Whether there are instructions for sums of products of bytes, as block_integers.h asks."""
    flags = set(cpu_info().get("flags", "").split())
    return "avx512_vnni" in flags or ("avx_vnni" in flags and "avx512f" not in flags)
