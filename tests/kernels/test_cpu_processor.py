"""Which products a processor is good at, from what the system and oneDNN say about it."""

import pytest
import torch

from nanovllm.kernels.cpu import processor
from nanovllm.kernels.cpu.processor import Products, fastest_products

AVX2 = "fpu sse2 fma avx2"
AVX512 = f"{AVX2} avx512f avx512bw"
FLOAT32 = frozenset([torch.float32])
BOTH = FLOAT32 | {torch.bfloat16}


@pytest.mark.parametrize(
    ("vendor", "flags", "expected"),
    [
        ("GenuineIntel", AVX2, True),
        ("GenuineIntel", AVX512, True),
        ("GenuineIntel", f"{AVX512} avx512_bf16", True),
        ("GenuineIntel", f"{AVX512} avx512_bf16 amx_bf16", False),
        ("AuthenticAMD", AVX2, True),
        ("AuthenticAMD", AVX512, True),
        ("AuthenticAMD", f"{AVX512} avx512_bf16", False),
        ("GenuineIntel", "fpu sse2 avx", False),
        ("", "", False),
    ],
)
def test_other_products_are_faster_with_amx_and_with_amds_units(
    vendor: str, flags: str, expected: bool
) -> None:
    found = fastest_products(dict(vendor_id=vendor, flags=flags), BOTH)
    assert found == Products(tiled=BOTH if expected else frozenset(), packed=BOTH)


@pytest.mark.parametrize(("flags", "tiled"), [(f"{AVX512} amx_bf16", BOTH), ("", frozenset())])
def test_without_onednns_bfloat16_ours_is_taken(flags: str, tiled: frozenset[torch.dtype]) -> None:
    """PyTorch may be built without oneDNN, and ONEDNN_MAX_CPU_ISA may forbid some of it."""
    for packed in (FLOAT32, frozenset[torch.dtype]()):
        assert fastest_products(dict(flags=flags), packed) == Products(tiled, packed)


def test_a_model_keeps_its_type_where_pytorch_has_kernels_for_it() -> None:
    with_bf16, without = Products(packed=BOTH), Products(tiled=BOTH, packed=FLOAT32)
    assert with_bf16.computes(torch.bfloat16) and not without.computes(torch.bfloat16)
    for products in (with_bf16, without, Products()):
        assert products.computes(torch.float32) and not products.computes(torch.float16)


def test_the_processor_is_described() -> None:
    found = processor.cpu_info()
    assert "" not in found
    if "model name" in found:
        assert found["model name"] in processor.description()
