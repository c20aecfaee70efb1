"""Products of weights in GGUF's blocks in one order: rows alone and among others.

Sums are those of `gpu_sums`.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from gpu_sums import sums_of_a_gpu  # noqa: F401  a fixture
from test_ordered_products import (
    assert_alone_as_among_others,
    kernels,  # noqa: F401  a fixture
    random,
)
from test_triton_block_linear import assert_near, blocks, values

from nanovllm.kernels.table import Kernels

pytestmark = pytest.mark.usefixtures("one_thread", "sums_of_a_gpu")


# Inputs in four parts, of which the last one is empty, or shorter; and all in one part.
@pytest.mark.parametrize(
    ("name", "size_out", "size_in"), [("Q8_0", 20, 1024), ("Q4_K", 20, 1280), ("Q6_K", 400, 512)]
)
def test_rows_of_blocks_do_not_depend_on_others(
    name: str,
    size_out: int,
    size_in: int,
    kernels: Kernels,  # noqa: F811
    kernel_device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default, one or two rows are rounded to integers, and many rows have other parts.

    The second half of the products is the first one with the other sign: what is left is
    what the order of sums leaves.
    """
    pytest.importorskip("triton")
    from nanovllm.kernels.triton.ordered import block_linear

    if kernel_device == "cpu":
        monkeypatch.setattr(block_linear, "MOST_ROWS", 130)
    weight = blocks(name, size_out, size_in, kernel_device)
    blocks_of_half = size_in // weight.kind.size // 2
    half = blocks_of_half * weight.kind.size
    weight.codes[:, blocks_of_half : 2 * blocks_of_half] = weight.codes[:, :blocks_of_half]
    operand = kernels.arrange_blocks(weight)
    assert kernel_device != "cpu" or block_linear.parts_of(operand) == (4 if size_out == 20 else 1)
    x = random(140 if kernel_device == "cpu" else 600, weight.shape[1], device=kernel_device)
    bias = random(size_out, device=kernel_device, seed=1)
    assert_near(
        kernels.block_linear(x, operand, bias), x.float() @ values(weight).T + bias.float(), 2**-6
    )
    x[:, half : 2 * half] = -x[:, :half]
    x[:, 2 * half :] = 0

    def product(rows: int) -> torch.Tensor:
        return kernels.block_linear(x[:rows], operand, None)

    assert_alone_as_among_others(product, [1, 2, 3, 40, 70, len(x)])
    whole = product(70)
    monkeypatch.setattr(block_linear, "MOST_NUMBERS", 33 * max(operand.shape))
    assert torch.equal(product(70), whole)
    assert not operand.arrivals.any()
    assert kernels.rounding(operand, 1) is None


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_library_is_compared_before_steps_as_steps_call_it(
    with_bias: bool, dtype: torch.dtype, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that compares would sync, and in a dry run its result would be wrong."""
    pytest.importorskip("triton")
    from nanovllm.kernels.triton.ordered import block_linear, linear

    compared: list[tuple[object, ...]] = []

    def agreeing(*given: object) -> tuple[int, ...]:
        compared.append(given)
        return (128,)

    for module in (block_linear, linear):
        monkeypatch.setattr(module, "agreeing", agreeing)
    monkeypatch.setattr(block_linear, "MOST_ROWS", 130)
    operand = block_linear.arrange_blocks(blocks("Q6_K", 400, 512, kernel_device))
    before, compared[:] = [*compared], []
    x = random(140, 512, device=kernel_device, dtype=dtype)
    bias = random(400, device=kernel_device, dtype=dtype) if with_bias else None
    pieces = mock.Mock(wraps=linear.pieces_of)
    monkeypatch.setattr(linear, "pieces_of", pieces)
    block_linear.block_linear(x, operand, bias)
    assert compared and set(compared) <= set(before)
    pieces.assert_called_once_with(140, (128,))


def test_tiles_are_large_where_they_are_enough_for_a_gpu(kernel_device: str) -> None:
    pytest.importorskip("triton")
    from nanovllm.kernels.triton.linear.block_linear import arrange_blocks
    from nanovllm.kernels.triton.ordered.block_linear import LARGE, SMALL, tiles_of

    planes = arrange_blocks(blocks("Q4_0", 20, 256, kernel_device))
    assert tiles_of(65, planes, 2) == replace(SMALL, parts=2)
    assert tiles_of(128 * 2 * 1000, planes, 2) == replace(LARGE, parts=2)
    assert tiles_of(128, planes, 1).splits == 1
