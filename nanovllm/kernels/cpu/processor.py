"""Find this machine's processor, and the kernels with which it multiplies plain matrices fastest.

`products` makes all choices that depend on the processor, except those of compilers.
"""

import functools
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

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


class Products(NamedTuple):
    """The types of plain matrices that the CPU's kernels multiply by; PyTorch multiplies the
    others.

    A type that is in both is tiled, if the kernels for tiles are used and can be compiled.
    """

    tiled: frozenset[torch.dtype] = frozenset()  # by `tiled_linear`
    packed: frozenset[torch.dtype] = frozenset()  # by `packed_linear`

    def computes(self, dtype: torch.dtype) -> bool:
        """Whether PyTorch has matrix kernels for `dtype`, not only an emulation."""
        return dtype == torch.float32 or dtype in self.packed


@functools.cache
def products() -> Products:
    """The fastest products on this processor, or on the one that ONEDNN_MAX_CPU_ISA names.

    Callers read this function from the module, so that tests can replace it.
    """
    return fastest_products(cpu_info(), onednn_types())


def onednn_types() -> frozenset[torch.dtype]:
    """The types that oneDNN multiplies fast here. Most builds of PyTorch contain oneDNN."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return frozenset()
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return frozenset((torch.float32, torch.bfloat16) if has_bf16 else (torch.float32,))


def fastest_products(info: Mapping[str, str], packed: frozenset[torch.dtype]) -> Products:
    """The products for a processor with these lines of /proc/cpuinfo; oneDNN has `packed`.

    Our kernels multiply in float32, with AVX2. oneDNN's bfloat16 is faster with AMX, and with AMD's
    vector units. Intel's vector units take as long for it as for two products of float32, and
    converting is free.
    """
    flags = set(info.get("flags", "").split())
    has_fast_units = "amx_bf16" in flags or (
        "avx512_bf16" in flags and info.get("vendor_id") == "AuthenticAMD"
    )
    if not {"avx2", "fma"} <= flags or (has_fast_units and torch.bfloat16 in packed):
        return Products(packed=packed)
    return Products(tiled=frozenset((torch.float32, torch.bfloat16)), packed=packed)
