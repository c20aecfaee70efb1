"""Rounding with a calibration: errors of outputs, unused inputs, odd sizes, packed codes."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

from nanovllm.quantize import gptq as algorithm
from nanovllm.quantize.codes import Codes, best_scales, nearest, rounded
from nanovllm.quantize.gptq import gptq
from nanovllm.quantize.stored import packed_tensors

pytestmark = pytest.mark.usefixtures("one_thread")

GROUP, BF16 = 32, torch.bfloat16


def inputs(size: int, rank: int, seed: int = 0) -> torch.Tensor:
    """Rows [512, size] that depend on `rank` numbers, with a little noise; some are much larger."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (512, rank), (rank, size)
    hidden, mixing = (torch.randn(shape, generator=generator) for shape in shapes)
    rows = hidden @ mixing + 0.3 * torch.randn(512, size, generator=generator)
    return rows * torch.linspace(0.2, 3.0, size)[torch.randperm(size, generator=generator)]


def error(weight: torch.Tensor, codes: Codes, rows: torch.Tensor, group: int = GROUP) -> float:
    """The mean squared error of the outputs."""
    return ((codes.values(group) - weight) @ rows.t()).square().mean().item()


@pytest.mark.parametrize("size", [32, 96, 144, 200])
def test_outputs_err_less_than_with_rounding(size: int) -> None:
    """Also than with rounding by the same scales: without the feedback of errors both are equal."""
    weight, rows = (
        torch.randn(48, size, generator=torch.Generator().manual_seed(1)),
        inputs(size, 6),
    )
    products = rows.t() @ rows
    found = gptq(weight, products, 4, GROUP, BF16)
    each = found.scales.float().repeat_interleave(GROUP, 1)[:, :size]
    alike = Codes(nearest(weight, each, 4).to(torch.int8), found.scales, 4)
    assert error(weight, found, rows) < 0.4 * error(weight, alike, rows)
    assert error(weight, found, rows) < 0.4 * error(weight, rounded(weight, 4, GROUP, BF16), rows)


def test_the_size_of_blocks_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors reach all later inputs, of the same block or of others."""
    weight, rows = torch.randn(48, 96), inputs(96, 6)
    products = rows.t() @ rows
    whole = gptq(weight, products, 4, GROUP, BF16).codes
    monkeypatch.setattr(algorithm, "BLOCK", 20)
    parts = gptq(weight, products, 4, GROUP, BF16).codes
    assert (whole == parts).float().mean() > 0.98


def test_a_second_text_gains_too() -> None:
    """The inputs of other samples with the same dependencies."""
    weight, rows = torch.randn(48, 96), inputs(96, 6)
    calibration, other = rows[:256], rows[256:]
    found = gptq(weight, calibration.t() @ calibration, 4, GROUP, BF16)
    assert error(weight, found, other) < 0.6 * error(weight, rounded(weight, 4, GROUP, BF16), other)


def test_independent_inputs_are_rounded_to_nearest() -> None:
    """No input can make up for another: the order of rounding and of the codes shows."""
    weight, squares = torch.randn(8, 96), torch.rand(96) + 0.5
    found = gptq(weight, squares.diag(), 4, GROUP, BF16)
    scales = best_scales(weight, squares, 4, GROUP, BF16)
    assert torch.equal(found.scales.float(), scales)
    assert torch.equal(found.codes, nearest(weight, scales.repeat_interleave(GROUP, 1), 4).char())


def test_inputs_that_the_text_never_uses_keep_their_weights() -> None:
    """A zero in the diagonal is no division by zero, and no reason to drop the weights."""
    weight, rows = 0.05 * torch.randn(16, 96), inputs(96, 96)
    rows[:, 5] = 0  # one in a group
    rows[:, 32:64] = 0  # a whole group
    found = gptq(weight, rows.t() @ rows, 4, GROUP, BF16).values(GROUP)
    dead = [5, *range(32, 64)]
    assert (found - weight)[:, dead].abs().max() < 0.03
    nothing = gptq(weight, torch.zeros(96, 96), 4, GROUP, BF16)
    assert torch.equal(nothing.codes, rounded(weight, 4, GROUP, BF16).codes)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_refused(value: float) -> None:
    """They are not taken for inputs that the text never uses."""
    products = torch.eye(64)
    products[3, 3] = value
    with pytest.raises(ValueError, match="inputs of a layer are not finite"):
        gptq(torch.randn(16, 64), products, 4, GROUP, BF16)


def test_equal_inputs_have_factors() -> None:
    """Their products have no inverse, without damping."""
    weight, rows = torch.randn(16, 64), inputs(64, 64)
    rows[:, 1:] = rows[:, :1]
    found = gptq(weight, rows.t() @ rows * 1e6, 4, GROUP, BF16)
    assert found.values(GROUP).isfinite().all()
    assert error(weight, found, rows) < 0.05 * error(weight, rounded(weight, 4, GROUP, BF16), rows)


def test_no_other_scale_of_a_few_is_better() -> None:
    """Each group's scale is about the best one, by the weighted error."""
    weight, factors = torch.randn(16, 64), torch.rand(64) ** 3
    scales = best_scales(weight, factors, 4, GROUP, BF16)
    counted = factors + 0.01 * factors.mean()

    def weighted(each: torch.Tensor) -> torch.Tensor:
        values = each.repeat_interleave(GROUP, 1)
        left = (nearest(weight, values, 4) * values - weight).square() * counted
        return left.view(16, 2, GROUP).sum(2)

    largest = weight.view(16, 2, GROUP).abs().amax(2)
    grid = torch.stack([weighted(sign * largest / 7 * f) for sign in (1, -1)
                        for f in torch.linspace(0.5, 1.1, 60).tolist()])  # fmt: skip
    assert weighted(scales).sum() < 1.02 * grid.amin(0).sum()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [32, 45, 64])
def test_words_are_those_of_compressed_tensors(size: int, bits: int) -> None:
    weight = torch.randn(8, size)
    codes = rounded(weight, bits, GROUP if bits == 4 else None, BF16)
    stored = packed_tensors(codes)
    unpacked = unpack_from_int32(stored["weight_packed"], bits, weight.shape)
    assert torch.equal(unpacked, codes.codes)
    assert stored["weight_scale"].shape == (8, -(-size // GROUP) if bits == 4 else 1)


def test_eight_bits_err_by_half_a_step() -> None:
    weight = torch.randn(8, 45)
    codes = rounded(weight, 8, None, BF16)
    assert ((codes.values(45) - weight).abs() <= 0.51 * codes.scales.abs().float()).all()


def test_zeros_and_tiny_weights_have_scales() -> None:
    for weight in (torch.zeros(4, 64), torch.full((4, 64), 1e-41)):
        assert (rounded(weight, 4, GROUP, BF16).values(GROUP) - weight).abs().max() < 1e-40
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="NaN or infinite"):
            rounded(torch.full((4, 64), value), 4, GROUP, BF16)


def test_scales_of_float16_are_in_its_range() -> None:
    """vLLM reads the scales of a float16 model in that type."""
    weight = torch.randn(8, 64) * 1e-6
    codes = rounded(weight, 4, GROUP, torch.float16)
    assert codes.scales.dtype == torch.float16
    assert (codes.values(GROUP) - weight).abs().max() < 5e-7
