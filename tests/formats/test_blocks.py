"""From codes and the groups of their columns to a QuantizedMatrix of even blocks."""

import pytest
import torch

from nanovllm.formats.blocks import quantized_matrix
from nanovllm.formats.stored import Axis, RankPart, Stored
from nanovllm.kernels.plain.quantized_linear import dense_matrix
from nanovllm.kernels.triton.linear.arranged import arrange


@pytest.mark.parametrize(
    ("dtype", "zeros"),
    [(torch.int8, False), (torch.int8, True), (torch.float8_e4m3fn, False)],
)
@pytest.mark.parametrize(
    ("groups", "columns"),
    [
        ([64], 64),
        ([8], 8),  # one group needs no padding
        ([32, 32, 8], 32),
        ([16, 16, 16], 16),
        ([8, 8, 8, 8], 16),
        ([8, 8, 8, 3], 16),
        ([5, 8, 8], 16),
        ([24, 24, 24], 32),
        ([40, 40], 32),
        ([7, 32, 25], 32),
    ],
    ids=str,
)
def test_groups_have_multiples_of_16_columns(
    groups: list[int], columns: int, dtype: torch.dtype, zeros: bool
) -> None:
    """So that kernels multiply the codes: others are padded, by columns that add nothing."""
    torch.manual_seed(0)
    size_in, num_groups = sum(groups), len(groups)
    codes = torch.randint(-8, 8, (6, size_in)).to(dtype)
    scales = torch.rand(6, num_groups)
    points = torch.randint(-8, 8, (6, num_groups), dtype=torch.int8) if zeros else None
    of_column = torch.arange(num_groups).repeat_interleave(torch.tensor(groups))
    found = quantized_matrix(codes, scales, points, torch.arange(6), of_column, 8)
    shift = 0 if points is None else points[:, of_column].float()
    expected = (codes.float() - shift) * scales[:, of_column]
    assert torch.equal(dense_matrix(found, size_in), expected)
    assert found.block[1] == columns
    assert arrange(found).has_rows_kernel


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_rows", [1, 70])
def test_padded_groups_of_8_are_multiplied(bits: int, num_rows: int, kernel_device: str) -> None:
    """By the kernels for few rows, and those for many."""
    from nanovllm.kernels.triton.linear.quantized_linear import quantized_linear

    torch.manual_seed(0)
    codes = torch.randint(-8, 8, (24, 72), dtype=torch.int8)
    scales, points = torch.rand(24, 9), torch.randint(-8, 8, (24, 9), dtype=torch.int8)
    of_column = torch.arange(9).repeat_interleave(8)
    tensors = (each.to(kernel_device) for each in (codes, scales, points))
    rows, columns = torch.arange(24, device=kernel_device), of_column.to(kernel_device)
    found = quantized_matrix(*tensors, rows, columns, bits)
    x = torch.randn(num_rows, 72).bfloat16()
    expected = x.float() @ ((codes.float() - points[:, of_column]) * scales[:, of_column]).T
    out = quantized_linear(x.to(kernel_device), arrange(found)).float().cpu()
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-6 * float(expected.std()))


def test_the_last_block_may_be_cut_off() -> None:
    """It does not make the others smaller, which kernels would read in more steps."""
    codes = torch.zeros(2, 80, dtype=torch.int8)
    blocks = torch.arange(80) // 32
    matrix = quantized_matrix(codes, torch.ones(1, 3), None, torch.zeros(2).long(), blocks, 8)
    assert matrix.block == (2, 32)


def test_blocks_that_begin_inside_a_projection_are_refused() -> None:
    """Two projections of 6 and 8 rows: the second one begins inside a block of 4."""
    held = RankPart((6, 8), (slice(0, 6), slice(0, 8)), 16, slice(0, 16))
    stored = Stored((Axis(of_rows=True, unit=4), Axis(of_rows=False, unit=16)))
    with pytest.raises(ValueError, match="blocks of 4 rows that do not begin where those of"):
        held.load(stored, torch.empty(held.shape(stored)), torch.ones(4, 1), None)
