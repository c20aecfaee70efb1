"""GGUF's blocks in Triton's kernels against their plain definition.

On a device, or interpreted where there is none.
"""

import pytest
import torch
from blocks import random_blocks

from nanovllm.kernels.operands.block_matrix import BlockMatrix
from nanovllm.kernels.operands.block_types import BLOCK_TYPES
from nanovllm.kernels.operands.scaled import Scaled
from nanovllm.kernels.plain import block_linear as plain
from nanovllm.kernels.plain.few_rows import add_linear, scaled_gated

pytestmark = pytest.mark.usefixtures("one_thread")

every_type = pytest.mark.parametrize("name", BLOCK_TYPES)
bf16 = torch.bfloat16
EPS = 1e-6


def blocks(name: str, size_out: int, size_in: int, device: str) -> BlockMatrix:
    """Random blocks; types of 32 values have another 32 inputs, so that a run is not whole."""
    kind = BLOCK_TYPES[name]
    weight = random_blocks(name, size_out, size_in + 32 * (kind.size == 32))
    return BlockMatrix(weight.codes.to(device), kind)


def values(weight: BlockMatrix) -> torch.Tensor:
    return plain.dequantize(weight.codes, weight.kind).flatten(1)


def assert_near(out: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Differences are bounded by the largest entry."""
    assert out.shape == expected.shape
    assert float((out.float() - expected.float()).abs().max() / expected.abs().max()) <= bound


@every_type
def test_values_and_rows_are_those_of_the_file(name: str, kernel_device: str) -> None:
    """Fails if a code, a scale or a min is at another place, or a value is rounded twice."""
    from nanovllm.kernels.triton.linear.block_dequantize import block_rows, dequantize_blocks
    from nanovllm.kernels.triton.linear.block_planes import arrange_blocks

    weight = blocks(name, 37, 512, kernel_device)
    arranged, exact = arrange_blocks(weight), values(weight)
    assert torch.equal(dequantize_blocks(arranged, torch.float32), exact)
    ids = torch.tensor([36, 0, 5, 5], device=kernel_device)
    assert torch.equal(block_rows(arranged, ids, torch.float32), exact[ids])


@every_type
def test_planes_take_little_more_memory_than_the_file(name: str) -> None:
    from nanovllm.kernels.triton.linear.block_planes import arrange_blocks

    weight = random_blocks(name, 9, 1024)
    assert arrange_blocks(weight).num_bytes <= 1.06 * weight.codes.nbytes


def test_a_weight_is_arranged_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a chunk of rows overwrites another one."""
    from nanovllm.kernels.triton.linear import block_planes

    weight = random_blocks("Q5_K", 9, 512)
    whole = block_planes.arrange_blocks(weight)
    monkeypatch.setattr(block_planes, "CHUNK", 2 * 512)
    parts = block_planes.arrange_blocks(weight)
    for a, b in zip(whole.tensors, parts.tensors, strict=True):
        assert torch.equal(a, b)


def test_all_scales_of_mxfp4_are_powers_of_two(kernel_device: str) -> None:
    """The smallest two are subnormal numbers; those of the largest ones are finite."""
    from nanovllm.kernels.triton.linear.block_dequantize import dequantize_blocks
    from nanovllm.kernels.triton.linear.block_planes import arrange_blocks

    weight = random_blocks("MXFP4", 250, 32)
    weight.codes[:, 0, 0] = torch.arange(250)
    weight = BlockMatrix(weight.codes.to(kernel_device), weight.kind)
    assert torch.equal(dequantize_blocks(arrange_blocks(weight), torch.float32), values(weight))


# A type for each form of codes and scales with all numbers of rows; the others with one.
ROWS = [(name, 3) for name in BLOCK_TYPES] + [
    (name, rows) for name in ("Q4_0", "Q6_K") for rows in (1, 17, 40)
]


@pytest.mark.parametrize(("name", "rows"), ROWS)
def test_products_are_those_of_the_values(name: str, rows: int, kernel_device: str) -> None:
    """Fails if a part of K is lost or added twice, outputs are mixed up, or a bias is not added."""
    from nanovllm.kernels.triton.linear.block_linear import arrange_blocks, block_linear

    weight = blocks(name, 37, 512, kernel_device)
    arranged = arrange_blocks(weight)
    x = torch.randn(rows, weight.shape[1], device=kernel_device).to(bf16)
    bias = torch.randn(37, device=kernel_device).to(bf16)
    out = block_linear(x, arranged, bias)
    assert out.dtype == bf16
    assert_near(out, x.float() @ values(weight).T + bias.float(), 2**-6)
    assert not arranged.arrivals.any()


def test_rows_of_float16_and_float32_and_many_rows(kernel_device: str) -> None:
    """Many rows, and those of float32, take the dequantized weight."""
    from nanovllm.kernels.triton.linear import block_linear as triton

    weight = blocks("Q4_K", 40, 512, kernel_device)
    arranged = triton.arrange_blocks(weight)
    for rows, dtype, bound in ((2, torch.float32, 1e-5), (2, torch.float16, 2**-9),
                               (triton.MOST_ROWS + 1, bf16, 2**-6), (0, bf16, 0.0)):  # fmt: skip
        x = torch.randn(rows, 2 * 512, device=kernel_device).to(dtype)[:, ::2]  # not contiguous
        out = triton.block_linear(x, arranged, None)
        assert out.dtype == dtype and out.shape == (rows, 40)
        if rows:
            assert_near(out, x.float() @ values(weight).T, bound)


def test_a_row_does_not_depend_on_other_rows(kernel_device: str) -> None:
    """1 or 2 rows, and 3 to 64: fails if the parts of K follow the number of rows."""
    from nanovllm.kernels.triton.linear.block_linear import arrange_blocks, block_linear

    arranged = arrange_blocks(blocks("Q8_0", 20, 1024, kernel_device))
    x = torch.randn(64, 1056, device=kernel_device).to(bf16)
    for fewer, rows in ((1, 2), (3, 64), (20, 64)):
        together = block_linear(x[:rows], arranged, None)
        assert torch.equal(block_linear(x[:fewer], arranged, None), together[:fewer])


def test_rows_are_rounded_by_the_kernels_before_the_product(kernel_device: str) -> None:
    """The norm, its sum with a residual, and the activation: as rows that are rounded alone."""
    from nanovllm.kernels.triton.linear.block_linear import arrange_blocks, block_linear
    from nanovllm.kernels.triton.linear.rms_norm import add_rms_norm, rms_norm
    from nanovllm.kernels.triton.linear.rounding import rounding_of
    from nanovllm.kernels.triton.linear.silu_and_mul import silu_and_mul

    arranged = arrange_blocks(blocks("Q4_1", 20, 256, kernel_device))
    x, residual, weight, both = (
        torch.randn(*size, device=kernel_device).to(bf16)
        for size in ((2, 288), (2, 288), (288,), (2, 576))
    )
    rounding = rounding_of(arranged, 2)
    assert rounding is not None and rounding_of(arranged, 3) is None
    made, total = rounding.add_rms_norm(x, residual, weight, EPS)
    normed, summed = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, summed)
    pairs = [
        (rounding.rms_norm(x, weight, EPS), rms_norm(x, weight, EPS)),
        (made, normed),
        (rounding.silu_and_mul(both), silu_and_mul(both)),
    ]
    for rows, plain_rows in pairs:
        assert torch.equal(
            block_linear(rows, arranged, None), block_linear(plain_rows, arranged, None)
        )


@every_type
def test_integer_sums_of_a_thread_fit_32_bits(name: str) -> None:
    """For the largest codes, inputs and scales; fails if inputs get another bit."""
    from nanovllm.kernels.triton.linear.block_parts import parts_of
    from nanovllm.kernels.triton.linear.rounded_rows import MOST

    parts = parts_of(random_blocks(name, 1, 256).codes, BLOCK_TYPES[name])
    most_scale = {"bytes": parts.scale_center or 63, "nibbles": 15}.get(parts.scale_type, 1)
    bits = 8 if parts.numbers == "iq4" else parts.bits
    most_code = max((1 << bits) - parts.center, parts.center)
    inputs = 32 if parts.scale_type in ("bytes", "nibbles") else parts.group // 4
    assert inputs * most_code * MOST.value * most_scale < 1 << 31


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
def test_a_row_that_is_not_finite_stays_so(kernel_device: str) -> None:
    """Integers have no NaN: the scale of its run does."""
    from nanovllm.kernels.triton.linear.block_linear import arrange_blocks, block_linear

    x = torch.randn(2, 512, device=kernel_device).to(bf16)
    x[0, 130] = float("nan")
    x[1, 7] = float("inf")
    out = block_linear(x, arrange_blocks(blocks("Q4_K", 20, 512, kernel_device)), None)
    assert not out.isfinite().any()


def test_large_and_small_runs_are_rounded_alone(kernel_device: str) -> None:
    """An error is relative to the run's largest input: fails if a row has one scale."""
    from nanovllm.kernels.triton.linear.block_linear import arrange_blocks, block_linear

    weight = blocks("Q6_K", 33, 512, kernel_device)
    x = torch.randn(1, 512, device=kernel_device).to(torch.float16)
    x[:, :128] *= 2.0**-13
    other = x.clone()
    other[:, 128:] = 0
    arranged = arrange_blocks(weight)
    assert_near(block_linear(other, arranged, None), other.float() @ values(weight).T, 2**-9)
    assert_near(block_linear(x, arranged, None), x.float() @ values(weight).T, 2**-9)


@pytest.mark.parametrize("outputs", [16, 32, 128])
def test_tiles_of_all_sizes(outputs: int, kernel_device: str) -> None:
    """Fails if the lanes of a tile are those of another one."""
    from nanovllm.kernels.triton.linear.block_planes import arrange_blocks
    from nanovllm.kernels.triton.linear.block_products import launch
    from nanovllm.kernels.triton.linear.row_outputs import RowOperands
    from nanovllm.kernels.triton.linear.row_tiles import RowTiles

    weight = blocks("Q5_0", 150, 256, kernel_device)
    x = torch.randn(20, 288, device=kernel_device).to(torch.float16)
    out = x.new_empty(20, 150)
    launch(RowOperands(x, None, out), arrange_blocks(weight), RowTiles(16, outputs, 2, 1))
    assert_near(out, x.float() @ values(weight).T, 2**-9)


@pytest.mark.parametrize("rows", [1, 3])
def test_gates_by_gelu_of_several_parts(rows: int, kernel_device: str) -> None:
    from nanovllm.kernels.triton.linear.block_planes import arrange_blocks
    from nanovllm.kernels.triton.linear.few_rows import FewRows

    gate_up = blocks("Q8_0", 2 * 32, 1024, kernel_device)
    x = torch.randn(rows, 1056, device=kernel_device).to(bf16)
    scaled = Scaled(x, x.float().square().view(rows, 2, -1).sum(-1), EPS)
    expected = scaled_gated(scaled, values(gate_up).to(bf16), None, "gelu")
    out = FewRows(64).gated(scaled, arrange_blocks(gate_up), None, "gelu")
    assert_near(out, expected, 2**-5)


@pytest.mark.parametrize("two", [0, 1, 2])
def test_parts_take_as_much_memory_as_they_have_tiles(two: int, kernel_device: str) -> None:
    """Kernels pass the number of a gate's activation: 2 is not a third tile."""
    from part_tiles import leave_second_part

    parts = torch.zeros(8, 16, device=kernel_device)
    leave_second_part(parts, two)
    written = (2, 3) if two else (1,)
    assert [i for i, row in enumerate(parts) if row.any()] == [*written]


def test_products_fused_with_the_operations_around_them(kernel_device: str) -> None:
    """Gates and ups that are no whole tiles, and the sum with its next norm."""
    from nanovllm.kernels.triton.linear.block_planes import arrange_blocks
    from nanovllm.kernels.triton.linear.few_rows import FewRows, few_rows_for

    gate_up = blocks("Q4_K", 2 * 40, 256, kernel_device)
    down = blocks("Q6_K", 80, 256, kernel_device)
    arranged = [arrange_blocks(gate_up), arrange_blocks(down)]
    few = few_rows_for([*arranged]) or FewRows(64)
    x, attended, residual = (torch.randn(3, n, device=kernel_device).to(bf16)
                             for n in (256, 256, 80))  # fmt: skip
    scaled = Scaled(x, x.float().square().view(3, 2, -1).sum(-1), EPS)
    assert_near(
        few.gated(scaled, arranged[0]), scaled_gated(scaled, values(gate_up).to(bf16)), 2**-5
    )

    norm = torch.randn(80, device=kernel_device).to(bf16)
    total, made = few.add(attended, arranged[1], None, residual, norm, EPS)
    expected, exact = add_linear(attended, values(down).to(bf16), None, residual, norm, EPS)
    assert_near(total, expected, 2**-6)
    assert_near(made.product, exact.product, 2**-6)
    assert_near(made.squares.sum(1), exact.squares.sum(1), 2**-5)
