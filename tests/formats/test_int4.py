"""The forms of matrices that are quantized to 4 bits while they are loaded."""

import pytest
import torch

from nanovllm.formats import choice
from nanovllm.formats.scheme import INT4, Scheme
from nanovllm.formats.stored import RankPart
from nanovllm.kernels.cpu import processor
from nanovllm.kernels.operands.block_matrix import BlockMatrix
from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix
from nanovllm.kernels.plain.dequantize_blocks import dequantize
from nanovllm.kernels.plain.quantized_linear import dense_matrix
from nanovllm.quantize.codes import rounded
from nanovllm.quantize.stored import packed_tensors

pytestmark = pytest.mark.usefixtures("one_thread")


def weight_of(
    matrix: torch.Tensor, dtype: torch.dtype, columns: slice | None = None
) -> BlockMatrix | QuantizedMatrix:
    """What layers of a model of `dtype` multiply by, on a rank that has these columns."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        made = choice.format_of(INT4)
    finally:
        torch.set_default_dtype(before)
    part = RankPart.whole(*matrix.shape, columns)
    tensors = {}
    for name, tensor in made.of_plain(matrix).items():
        stored = made.tensors[name]
        tensors[name] = part.new(stored).data
        part.load(stored, tensors[name], tensor, None)
    weight = made.weight(tensors, part)
    assert isinstance(weight, BlockMatrix | QuantizedMatrix)
    return weight


def values_of(weight: BlockMatrix | QuantizedMatrix, columns: int) -> torch.Tensor:
    if isinstance(weight, BlockMatrix):
        return dequantize(weight.codes, weight.kind).flatten(1)
    return dense_matrix(weight, columns)


@pytest.mark.parametrize("has_instructions", [False, True])
def test_the_blocks_of_a_bfloat16_model_have_the_same_values(
    has_instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's columns may begin and end inside of a group; then there are no blocks."""
    monkeypatch.setattr(processor, "multiplies_bytes", lambda: has_instructions)
    matrix = 0.02 * torch.randn(7, 192, generator=torch.Generator().manual_seed(0))
    exact = values_of(weight_of(matrix, torch.float32), 192)
    for columns in (slice(0, 192), slice(64, 128), slice(48, 144), slice(0, 24)):
        weight = weight_of(matrix, torch.bfloat16, columns)
        whole = columns.start % 32 == columns.stop % 32 == 0
        assert isinstance(weight, BlockMatrix) == (has_instructions and whole), columns
        size = columns.stop - columns.start
        assert torch.equal(values_of(weight, size).float(), exact[:, columns]), columns
    assert isinstance(weight_of(matrix, torch.float32), QuantizedMatrix)


@pytest.mark.parametrize("group", [32, 64])
def test_saved_groups_of_32_have_blocks_too(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of compressed-tensors, as `nanovllm quantize` saves them: or they would be slower."""
    monkeypatch.setattr(processor, "multiplies_bytes", lambda: True)
    matrix = 0.02 * torch.randn(7, 192, generator=torch.Generator().manual_seed(0))
    codes = rounded(matrix, 4, group, torch.bfloat16)
    tensors = packed_tensors(codes)
    tensors["weight_scale"] = codes.scales.float()  # as parameters have them
    tensors["weight_shape"] = torch.tensor([[7, 192]])
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = choice.format_of(Scheme("packed", 4, rows=1, columns=group))
    finally:
        torch.set_default_dtype(before)
    weight = made.weight(tensors, RankPart.whole(7, 192))
    assert isinstance(weight, BlockMatrix if group == 32 else QuantizedMatrix)
    assert torch.equal(values_of(weight, 192).float(), codes.values(group))


def test_scales_that_float16_lacks_have_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "multiplies_bytes", lambda: True)
    matrix = torch.full((3, 64), 1e-9)
    weight = weight_of(matrix, torch.bfloat16)
    assert isinstance(weight, QuantizedMatrix)
    torch.testing.assert_close(values_of(weight, 64).float(), matrix, rtol=0.01, atol=0)
