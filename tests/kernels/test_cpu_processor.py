"""Which products a processor is good at, from what the system and oneDNN say about it."""

import pytest
import torch

from nanovllm.kernels.cpu import processor
from nanovllm.kernels.cpu.processor import types_to_tile
from nanovllm.kernels.plain import packed_linear

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
        ("GenuineIntel", f"{AVX512} avx512_bf16 amx_bf16", True),
        ("AuthenticAMD", AVX2, True),
        ("AuthenticAMD", AVX512, True),
        ("AuthenticAMD", f"{AVX512} avx512_bf16", False),
        ("GenuineIntel", "fpu sse2 avx", False),
        ("", "", False),
    ],
)
def test_other_products_are_faster_with_amds_units(vendor: str, flags: str, expected: bool) -> None:
    found = types_to_tile(dict(vendor_id=vendor, flags=flags), BOTH)
    assert found == (BOTH if expected else frozenset())


@pytest.mark.parametrize(("flags", "tiled"), [(f"{AVX512} avx512_bf16", BOTH), ("", frozenset())])
def test_without_onednns_bfloat16_ours_is_taken(flags: str, tiled: frozenset[torch.dtype]) -> None:
    """PyTorch may be built without oneDNN, and ONEDNN_MAX_CPU_ISA may forbid some of it."""
    for packed in (FLOAT32, frozenset[torch.dtype]()):
        info = dict(vendor_id="AuthenticAMD", flags=flags)
        assert types_to_tile(info, packed) == tiled


@pytest.mark.parametrize("packed", [BOTH, FLOAT32, frozenset()])
def test_a_model_keeps_its_type_where_pytorch_has_kernels_for_it(
    packed: frozenset[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "packed_types", lambda: packed)
    assert packed_linear.computes(torch.bfloat16) is (packed == BOTH)
    assert packed_linear.computes(torch.float32) and not packed_linear.computes(torch.float16)


def test_the_processor_is_described() -> None:
    found = processor.cpu_info()
    assert "" not in found
    if "model name" in found:
        assert found["model name"] in processor.description()
