"""GGUF's blocks in plain PyTorch against the gguf package."""

import gguf
import pytest
import torch
from blocks import random_blocks

from nanovllm.kernels.operands.block_matrix import BlockMatrix
from nanovllm.kernels.operands.block_types import BLOCK_TYPES
from nanovllm.kernels.plain import block_linear as plain
from nanovllm.kernels.plain.block_rows import block_rows


def reference(weight: BlockMatrix) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType[weight.kind.name]
    return torch.from_numpy(gguf.dequantize(weight.codes.flatten(1).numpy(), kind))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_the_table_has_the_sizes_of_the_format(name: str) -> None:
    kind = BLOCK_TYPES[name]
    number = gguf.GGMLQuantizationType[name]
    assert (kind.number, kind.size, kind.num_bytes) == (number, *gguf.GGML_QUANT_SIZES[number])


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_values_are_those_of_the_gguf_package(name: str) -> None:
    """Fails if a field of a type is at another place, has another sign, or is rounded otherwise."""
    for size_out in (1, 37):
        weight = random_blocks(name, size_out, 768)
        values = plain.dequantize(weight.codes, weight.kind).flatten(1)
        assert torch.equal(values.view(torch.int32), reference(weight).view(torch.int32))


def test_all_scales_of_mxfp4_are_powers_of_two() -> None:
    """The smallest two are subnormal numbers."""
    weight = random_blocks("MXFP4", 256, 32)
    weight.codes[:, 0, 0] = torch.arange(256)
    assert torch.equal(plain.dequantize(weight.codes, weight.kind).flatten(1), reference(weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_parts_are_the_whole(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a part of the outputs is lost, has another bias, or is rounded twice."""
    weight = random_blocks("Q4_K", 37, 768)
    x, bias = torch.randn(5, 768).to(dtype), torch.randn(37).to(dtype)
    exact = x.double() @ reference(weight).double().T
    for some in (plain.SOME_VALUES, 768 * 10):
        monkeypatch.setattr(plain, "SOME_VALUES", some)
        for expected, out in (
            (exact, plain.block_linear(x, weight)),
            (exact + bias.double(), plain.block_linear(x, weight, bias)),
        ):
            assert out.dtype == dtype
            unit = torch.finfo(dtype).eps / 2
            torch.testing.assert_close(out.double(), expected, rtol=1.01 * unit, atol=1e-5)


def test_rows_of_an_embedding() -> None:
    weight = random_blocks("Q6_K", 37, 512)
    ids = torch.tensor([36, 0, 5, 5])
    rows = block_rows(weight, ids, torch.bfloat16)
    assert torch.equal(rows, reference(weight)[ids].bfloat16())
