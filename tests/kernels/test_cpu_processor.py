"""Which products a processor is good at, from what the system says about it."""

import pytest

from nanovllm.kernels.cpu import processor

AVX2 = "fpu sse2 fma avx2"
AVX512 = f"{AVX2} avx512f avx512bw"


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
    vendor: str, flags: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "cpu_info", lambda: dict(vendor_id=vendor, flags=flags))
    assert processor.float32_is_fastest() is expected


def test_the_processor_is_described() -> None:
    found = processor.cpu_info()
    assert "" not in found
    if "model name" in found:
        assert found["model name"] in processor.description()
