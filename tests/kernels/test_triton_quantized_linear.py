"""Quantized weights in Triton's kernels against their plain definition.

On a device, or interpreted where there is none.

It costs more than 20 seconds: kernels are interpreted.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantized import FORMATS, Format, quantized, random

from nanovllm.kernels.operands.scaled import Scaled
from nanovllm.kernels.plain import quantize_rows as plain_rows
from nanovllm.kernels.plain import quantized_linear as plain
from nanovllm.kernels.plain.few_rows import add_linear, scaled_gated, scaled_linear

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = [(64, 512), (40, 300), (200, 384)]
EPS = 1e-6
bf16 = torch.bfloat16


def form_id(value: Any) -> str | None:
    if not isinstance(value, Format):
        return None
    return f"{value.kind} {value.block}{' zeros' * value.zeros} {value.scales}"


ROUNDED = [Format(), Format("e4m3"), Format("e4m3", (0, 0)), Format("e4m3", (128, 128))]
every_format = pytest.mark.parametrize("form", FORMATS, ids=form_id)


def assert_near(out: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Differences are bounded by the largest entry of their row."""
    assert out.shape == expected.shape
    size = expected.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)
    assert float(((out.float() - expected.float()).abs() / size).max()) <= bound


@pytest.mark.sampled
@every_format
@pytest.mark.parametrize("size", SIZES[:2])
def test_weights_are_those_of_the_definition(
    form: Format, size: tuple[int, int], kernel_device: str
) -> None:
    from nanovllm.kernels.triton.linear.dequantize import dequantize
    from nanovllm.kernels.triton.linear.quantized_linear import arrange

    matrix = quantized(*size, form, kernel_device)
    assert torch.equal(dequantize(arrange(matrix), torch.float32), plain.dequantize(matrix))
    stack = quantized(*size, replace(form, stack=(3,)), kernel_device)
    expected = plain.dequantize(stack, bf16)
    assert torch.equal(dequantize(arrange(stack), bf16), expected)


@pytest.mark.sampled
@every_format
@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("num_rows", [1, 17, 70])
def test_a_product_is_that_of_the_definition(
    form: Format, size: tuple[int, int], num_rows: int, kernel_device: str
) -> None:
    from nanovllm.kernels.triton.linear.quantized_linear import arrange, quantized_linear

    matrix = quantized(*size, form, kernel_device)
    x, bias = random(1, num_rows, size[1]).to(kernel_device), random(2, size[0]).to(kernel_device)
    arranged = arrange(matrix)
    for some in (None, bias):
        out = quantized_linear(x, arranged, some)
        assert_near(out, plain.quantized_linear(x, matrix, some), 4e-6)
    assert not bool(arranged.arrivals.any())


@pytest.mark.sampled
@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_rows_of_narrow_types_are_not_rounded(
    form: Format, dtype: torch.dtype, kernel_device: str
) -> None:
    """The sums are of exact products, in float32; the result is rounded once."""
    from nanovllm.kernels.triton.linear.quantized_linear import arrange, quantized_linear

    matrix = quantized(72, 320, form, kernel_device, rounds_inputs=True)
    for num_rows in (3, 20, 32):
        x = random(1, num_rows, 320).to(kernel_device, dtype)
        out = quantized_linear(x, arrange(matrix))
        exact = x.float() @ plain.dequantize(matrix).T
        assert out.dtype == dtype
        # The kernel's weights have no rounding of their own; those of 20 inputs a group have.
        assert_near(out, exact, 2.0**-6 if form.block[1] == 20 else 2.0**-8)


@pytest.mark.parametrize("kind", ["int8", "e4m3", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_becomes_its_number(kind: str, dtype: torch.dtype, kernel_device: str) -> None:
    """Multiplied by the identity: what the instructions make of each byte."""
    from nanovllm.kernels.triton.linear.quantized_linear import arrange, quantized_linear

    size = 256 if kind == "int4" else 64  # both halves of bytes
    matrix = quantized(256, size, Format(kind), kernel_device)
    codes = torch.arange(256 * size, device=kernel_device)
    codes = (codes + codes // 128 % 2 * 5).to(torch.int16) % 256
    if kind == "int4":
        codes = (codes % 16 - 8).to(torch.int8)
    elif kind == "int8":
        codes = (codes - 128).to(torch.int8)
    else:
        codes = codes.to(torch.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0
        codes = codes.view(torch.float8_e4m3fn)
    matrix = replace(matrix, codes=codes.view(256, size), scales=torch.ones_like(matrix.scales))
    eye = torch.eye(size, dtype=dtype, device=kernel_device)
    out = torch.cat([quantized_linear(part, arrange(matrix)) for part in eye.split(64)])
    assert torch.equal(out.T.float(), matrix.codes.float())


@pytest.mark.parametrize("block", [(1, 0), (128, 128)])
def test_a_code_that_is_nan_makes_its_output_nan(
    block: tuple[int, int], kernel_device: str
) -> None:
    from nanovllm.kernels.triton.linear.quantized_linear import arrange, quantized_linear

    matrix = quantized(130, 256, Format("e4m3", block), kernel_device, rounds_inputs=True)
    matrix.codes.view(torch.uint8)[5, 255] = 0x7F
    matrix.codes.view(torch.uint8)[128, 0] = 0xFF
    for num_rows in (4, 70):
        x = random(1, num_rows, 256).to(kernel_device)
        is_nan = quantized_linear(x, arrange(matrix)).isnan()
        assert is_nan[:, [5, 128]].all()
        assert is_nan.sum() == 2 * num_rows


@pytest.mark.parametrize("form", ROUNDED, ids=form_id)
def test_an_input_that_is_nan_makes_its_row_nan(form: Format, kernel_device: str) -> None:
    """Rows that are rounded, by a kernel of their own or with a norm."""
    from nanovllm.kernels.triton.linear.quantized_linear import (
        arrange,
        quantized_linear,
        rounding_of,
    )

    arranged = arrange(quantized(64, 256, form, kernel_device, rounds_inputs=True))
    rounding = rounding_of(arranged, 70)
    assert rounding is not None
    x = random(1, 70, 256).to(kernel_device)
    x[7, 200] = torch.nan
    normed = rounding.rms_norm(x, torch.ones(256, device=kernel_device), 1e-6)
    for rows in (x, normed):
        is_nan = quantized_linear(rows, arranged).isnan()
        assert is_nan[7].all()
        assert not is_nan[torch.arange(70) != 7].any()


def test_columns_may_be_in_another_order(kernel_device: str) -> None:
    from nanovllm.kernels.triton.linear.quantized_linear import arrange, quantized_linear

    order = torch.randperm(256, generator=torch.Generator().manual_seed(0)).to(kernel_device)
    matrix = quantized(64, 256, Format("int4", (1, 128)), kernel_device, order=order)
    for num_rows in (0, 4, 70):
        x = random(1, num_rows, 256).to(kernel_device)
        expected = plain.quantized_linear(x, matrix)
        out = quantized_linear(x, arrange(matrix))
        assert out.shape == expected.shape
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_rows_of_a_larger_matrix_are_read_as_they_are(kernel_device: str) -> None:
    """Rows that are not contiguous, and memory after them that is NaN."""
    from nanovllm.kernels.triton.linear.quantized_linear import arrange, quantized_linear

    matrix = quantized(64, 300, Format("int4", (1, 128)), kernel_device)
    wide = torch.full((6, 310), torch.nan, device=kernel_device)
    wide[:5, :300] = random(1, 5, 300)
    x = wide[:5, :300]
    out = quantized_linear(x, arrange(matrix))
    assert_near(out, plain.quantized_linear(x, matrix), 4e-6)


# Tiles, and programs that share one.
TILES = [(8, 32, 1), (8, 64, 8), (16, 64, 4), (32, 64, 2), (64, 64, 4), (64, 32, 1), (128, 64, 2)]


@pytest.mark.sampled
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("form", [FORMATS[0], FORMATS[6], FORMATS[9], FORMATS[11]], ids=form_id)
def test_every_tile_gives_the_same_sums(
    form: Format, tile: tuple[int, int, int], kernel_device: str
) -> None:
    """More programs than parts of K, too: the last ones have nothing to add."""
    from nanovllm.kernels.triton.linear.quantized_linear import arrange
    from nanovllm.kernels.triton.linear.quantized_rows import launch
    from nanovllm.kernels.triton.linear.row_outputs import RowOperands
    from nanovllm.kernels.triton.linear.row_tiles import RowTiles

    (rows, outputs, splits) = tile
    matrix = quantized(100, 640, form, kernel_device)
    arranged = arrange(matrix)
    x = random(1, 50 if rows >= 16 else 20, 640).to(kernel_device, bf16)
    exact = x.float() @ plain.dequantize(matrix).T
    for copies_x in (False, True):
        out = x.new_empty(len(x), 100)
        runs = 2 if form.kind == "int4" else 1
        tiles = RowTiles(rows, outputs, splits, 2, 4 if rows >= 64 else 2, copies_x, runs)
        launch(RowOperands(x, None, out), arranged, tiles)
        assert_near(out, exact, 2.0**-8)
        again = torch.empty_like(out)
        launch(RowOperands(x, None, again), arranged, tiles)
        assert torch.equal(out, again)


def scaled_of(x: torch.Tensor, parts: int) -> Scaled:
    norm = (random(3, x.shape[1]) + 2).to(x)
    squares = x.float().square().sum(dim=1, keepdim=True)
    return Scaled(x * norm, squares.expand(-1, parts).contiguous() / parts, EPS)


FUSED = [FORMATS[0], FORMATS[6], FORMATS[8], FORMATS[9]]


@pytest.mark.sampled
@pytest.mark.parametrize("form", FUSED, ids=form_id)
@pytest.mark.parametrize("num_rows", [1, 16, 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_fused_layers_equal_their_twins(
    form: Format, num_rows: int, with_bias: bool, kernel_device: str
) -> None:
    """The twins of `few_rows`, with the dequantized weight in float32."""
    from nanovllm.kernels.triton.linear.few_rows import FewRows
    from nanovllm.kernels.triton.linear.quantized_linear import arrange

    few = FewRows(64)
    x = random(1, num_rows, 320).to(kernel_device, bf16)
    scaled = scaled_of(x, 3)
    wide, narrow = (
        quantized(2 * 136, 320, form, kernel_device),
        quantized(80, 320, form, kernel_device),
    )
    wide_bias, bias = (random(4, size).to(x) if with_bias else None for size in (2 * 136, 80))
    wide_weight, weight = plain.dequantize(wide), plain.dequantize(narrow)
    out = few.linear(scaled, arrange(narrow), bias)
    assert_near(out, scaled_linear(scaled, weight, bias), 2.0**-7)
    out = few.gated(scaled, arrange(wide), wide_bias)
    assert_near(out, scaled_gated(scaled, wide_weight, wide_bias), 2.0**-7)
    residual, norm = random(5, num_rows, 80).to(x), (random(6, 80) + 2).to(x)
    expected, _ = add_linear(x, weight, bias, residual, norm, EPS)
    total, after = few.add(x, arrange(narrow), bias, residual, norm, EPS)
    assert_near(total, expected, 2.0**-7)
    assert torch.equal(after.product, total * norm) and after.eps == EPS
    torch.testing.assert_close(after.squares.sum(1), total.float().square().sum(1))


def test_layers_that_few_rows_cannot_compute_are_refused(kernel_device: str) -> None:
    from nanovllm.kernels.triton.common import can_copy_tiles
    from nanovllm.kernels.triton.linear.few_rows import FewRows, few_rows_for
    from nanovllm.kernels.triton.linear.quantized_linear import arrange

    if not can_copy_tiles(torch.device(kernel_device)):
        pytest.skip("few_rows is for Hopper GPUs")
    good = arrange(quantized(64, 256, Format("int4", (1, 128)), kernel_device))
    other = torch.zeros(64, 64, dtype=bf16, device=kernel_device)
    assert few_rows_for([good, other]) == FewRows(64)
    assert few_rows_for([good, other], torch.float16) is None
    odd = arrange(quantized(64, 300, Format("int4", (1, 20)), kernel_device))
    assert few_rows_for([good, odd]) is None
    ordered = replace(good, order=torch.arange(256))
    assert few_rows_for([ordered]) is None
    with pytest.raises(AssertionError, match="order of the codes"):
        FewRows(64).linear(scaled_of(random(1, 1, 256).to(kernel_device, bf16), 1), ordered)
    assert few_rows_for([good, other.float()]) is None


@pytest.mark.sampled(share=0.5)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("scale", [None, 0.01])
def test_rounded_rows_equal_their_twin(
    dtype: torch.dtype, group: int, scale: float | None, kernel_device: str
) -> None:
    from nanovllm.kernels.triton.linear.arranged import in_word_order
    from nanovllm.kernels.triton.linear.quantize_rows import RoundingKernels

    static = None if scale is None else torch.tensor(scale, device=kernel_device)
    for size in (64, 300, 4096 + 128):
        x = random(1, 5, size + 8).to(kernel_device, bf16)[:, :size]
        x[2] = 0
        x[3] *= 1e-6
        padded = -(-size // 128) * 128
        rows = RoundingKernels(dtype, group, static, padded).rows(x)
        expected, expected_scales = plain_rows.quantize_rows(x, dtype, group, static)
        assert torch.equal(rows.scales, expected_scales) and rows.dtype == x.dtype
        whole = F.pad(expected.view(torch.int8), (0, padded - size))
        assert torch.equal(rows.codes.view(torch.int8), in_word_order(whole))


@pytest.mark.sampled(share=0.5)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("scale", [None, 0.01])
def test_norms_and_activations_round_their_rows_as_a_kernel_of_its_own_would(
    dtype: torch.dtype, group: int, scale: float | None, kernel_device: str
) -> None:
    """The codes are those of the values that are rounded to the rows' type first."""
    from nanovllm.kernels.triton.linear.quantize_rows import RoundedRows, RoundingKernels
    from nanovllm.kernels.triton.linear.rms_norm import add_rms_norm, rms_norm
    from nanovllm.kernels.triton.linear.silu_and_mul import silu_and_mul

    def assert_equal(rows: RoundedRows, expected: RoundedRows) -> None:
        assert torch.equal(rows.codes.view(torch.int8), expected.codes.view(torch.int8))
        assert torch.equal(rows.scales, expected.scales) and rows.dtype == expected.dtype

    static = None if scale is None else torch.tensor(scale, device=kernel_device)
    for size in (64, 300, 4096 + 128):
        rounding = RoundingKernels(dtype, group, static, -(-size // 128) * 128)
        wide = random(1, 3, 2 * size + 8).to(kernel_device, bf16)
        x, residual = wide[:, :size], random(2, 3, size).to(kernel_device, bf16)
        norm = (random(3, size) + 2).to(x)
        assert_equal(rounding.rms_norm(x, norm, EPS), rounding.rows(rms_norm(x, norm, EPS)))
        rows, total = rounding.add_rms_norm(x, residual, norm, EPS)
        expected, expected_total = add_rms_norm(x, residual, norm, EPS)
        assert_equal(rows, rounding.rows(expected))
        assert torch.equal(total, expected_total)
        wide = wide[:, : 2 * size]
        assert_equal(rounding.silu_and_mul(wide), rounding.rows(silu_and_mul(wide)))


def rounded(x: torch.Tensor, form: Format, scale: torch.Tensor | None) -> torch.Tensor:
    """x after the rounding of its rows, in float32."""
    dtype = torch.int8 if form.kind == "int8" else torch.float8_e4m3fn
    codes, scales = plain_rows.quantize_rows(x, dtype, form.block[1], scale)
    width = form.block[1] or x.shape[1]
    return codes.float() * scales.repeat_interleave(width, dim=1)[:, : x.shape[1]]


@pytest.mark.sampled(share=0.5)
@pytest.mark.parametrize("form", ROUNDED, ids=form_id)
@pytest.mark.parametrize("static", [False, True])
def test_products_of_rounded_rows(form: Format, static: bool, kernel_device: str) -> None:
    """As if rows were rounded and then multiplied exactly. Few rows are not rounded."""
    from nanovllm.kernels.triton.linear.quantized_linear import arrange, quantized_linear
    from nanovllm.kernels.triton.linear.rounded_linear import can_round

    scale = torch.tensor(0.03, device=kernel_device) if static else None
    options = dict(rounds_inputs=True, input_scale=scale)
    matrix = quantized(208, 400, form, kernel_device, **options)
    arranged = arrange(matrix)
    if not can_round(arranged, arranged.device):
        pytest.skip("this GPU does not multiply e4m3")
    bias = random(2, 208).to(kernel_device, bf16)
    x = random(1, 133, 400).to(kernel_device, bf16)
    weight = plain.dequantize(matrix)
    for some in (None, bias):
        wide = None if some is None else some.float()
        expected = F.linear(rounded(x, form, scale), weight, wide)
        assert_near(quantized_linear(x, arranged, some), expected, 2.0**-7)
    assert_near(quantized_linear(x[:32], arranged), x[:32].float() @ weight.T, 2.0**-8)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "tile", [(64, 64, 4, 1), (64, 64, 3, 2), (64, 128, 1, 1), (128, 128, 2, 1)]
)
@pytest.mark.parametrize("form", ROUNDED, ids=form_id)
def test_every_tile_of_rounded_rows_gives_the_same_sums(
    form: Format, tile: tuple[int, int, int, int], kernel_device: str
) -> None:
    """More programs than parts of K, too."""
    from nanovllm.kernels.triton.linear.quantized_linear import arrange, rounding_of
    from nanovllm.kernels.triton.linear.rounded_linear import multiply
    from nanovllm.kernels.triton.linear.row_tiles import RowTiles

    rows, outputs, splits, runs = tile
    size = 768
    matrix = quantized(208, size, form, kernel_device, rounds_inputs=True)
    arranged = arrange(matrix)
    x = random(1, 133, size).to(kernel_device, bf16)
    rounding = rounding_of(arranged, 133)
    if rounding is None:
        pytest.skip("this GPU does not multiply e4m3")
    expected = rounded(x, form, None) @ plain.dequantize(matrix).T
    tiles = RowTiles(rows, outputs, splits, 2, 4, runs=1 if arranged.group else runs)
    for _ in range(2):
        assert_near(multiply(rounding.rows(x), arranged, None, tiles), expected, 2.0**-7)
    assert not arranged.arrivals.any()


def test_many_rounded_rows_of_few_outputs(
    kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight counts the parts of few tiles; with more tiles, no programs share one."""
    from nanovllm.kernels.triton.linear import rounded_linear
    from nanovllm.kernels.triton.linear.quantized_linear import arrange, quantized_linear

    monkeypatch.setattr(rounded_linear, "num_multiprocessors", lambda _: 132)
    arranged = arrange(quantized(16, 2048, Format(), kernel_device, rounds_inputs=True))
    for num_rows in (4 * 64, 17 * 64):
        x = random(1, num_rows, 2048).to(kernel_device)
        expected = (
            rounded(x, Format(), None)
            @ plain.dequantize(quantized(16, 2048, Format(), kernel_device)).T
        )
        assert_near(quantized_linear(x, arranged), expected, 1e-5)


@pytest.mark.parametrize("num_rows", [33, 128, 130])
def test_rounded_rows_fill_whole_tiles(num_rows: int, kernel_device: str) -> None:
    """A product of 136 rows takes longer than one of 256, which has no tile with rows missing."""
    from nanovllm.kernels.triton.common import ROOM, with_room
    from nanovllm.kernels.triton.linear.quantized_linear import arrange, rounding_of

    matrix = quantized(64, 256, Format(), kernel_device, rounds_inputs=True)
    rounding = rounding_of(arrange(matrix), num_rows)
    assert rounding is not None
    x = random(1, num_rows, 512).to(kernel_device, bf16)
    norm = torch.ones(256, device=kernel_device, dtype=bf16)
    narrow = x[:, :256]
    for rows in (
        rounding.rows(narrow),
        rounding.silu_and_mul(x),
        rounding.rms_norm(narrow, norm, EPS),
    ):
        assert len(rows.codes) == len(rows.scales) == num_rows
        assert len(with_room(rows.codes, ROOM)) == len(with_room(rows.scales, ROOM))
        assert len(with_room(rows.codes, ROOM)) % ROOM == 0


def test_weights_that_must_not_be_rounded_with_their_inputs(kernel_device: str) -> None:
    from nanovllm.kernels.triton.linear.quantized_linear import arrange
    from nanovllm.kernels.triton.linear.rounded_linear import can_round

    def rounds(form: Format, rounds_inputs: bool = True) -> bool:
        matrix = quantized(64, 256, form, kernel_device, rounds_inputs=rounds_inputs)
        return can_round(arrange(matrix), torch.device(kernel_device))

    assert rounds(Format())
    assert not rounds(Format(), rounds_inputs=False)
    assert not rounds(Format("int8", zeros=True))
    assert not rounds(Format("int8", (1, 128)))
    assert not rounds(Format("int4", (1, 0)))
    assert not rounds(Format("e4m3", (1, 64)))


@pytest.mark.cuda
@pytest.mark.parametrize("form", ROUNDED + FUSED, ids=form_id)
@pytest.mark.parametrize("num_rows", [1, 8, 16, 32, 64, 256])
def test_a_graph_multiplies_the_rows_of_its_replay(form: Format, num_rows: int) -> None:
    """At a real size; a graph's replays find the arrivals that the last one has reset."""
    from nanovllm.kernels.triton.linear.quantized_linear import arrange, quantized_linear

    matrix = quantized(4096, 4096, form, "cuda", rounds_inputs=form in ROUNDED)
    arranged = arrange(matrix)
    x = torch.zeros(num_rows, 4096, dtype=bf16, device="cuda")
    quantized_linear(x, arranged)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = quantized_linear(x, arranged)
    weight = plain.dequantize(matrix)
    for seed in (1, 2):
        x.copy_(random(seed, num_rows, 4096))
        graph.replay()
        rounds = num_rows > 32 and form in ROUNDED
        exact = (rounded(x, form, None) if rounds else x.float()) @ weight.T
        assert_near(out, exact, 2.0**-7)
