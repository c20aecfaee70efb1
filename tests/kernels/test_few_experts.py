"""Layers of experts for few rows, with norm and sum inside, against their twin.

On a device, or interpreted where there is none.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from conftest import kernel_settings
from hypothesis import example, given
from hypothesis import strategies as st
from quantized import Format, quantized

from nanovllm.kernels.operands.routing import Routing
from nanovllm.kernels.operands.scaled import ExpertWeights, Scaled
from nanovllm.kernels.plain.few_rows import add_experts
from nanovllm.kernels.plain.quantized_linear import dequantize
from nanovllm.kernels.triton.common import can_copy_tiles
from nanovllm.kernels.triton.experts import expert_rows
from nanovllm.kernels.triton.experts import few_experts as module
from nanovllm.kernels.triton.experts.route import Router
from nanovllm.kernels.triton.linear.quantized_linear import arrange

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Interpreted, of rows that tiles have too many; the results are not used.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]

EPS = 1e-6
bf16 = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """T tokens that take K of E experts; `favourites`: all of them the same."""

    tokens: int
    per_token: int
    num_experts: int
    hidden: int = 64
    inside: int = 32
    favourites: bool = False
    parts: int = 1
    seed: int = 0


SHAPES = st.builds(
    Shape,
    tokens=st.sampled_from([1, 2, 16, 17, 50]),
    per_token=st.integers(1, 4),
    num_experts=st.sampled_from([4, 5, 8, 60]),
    hidden=st.sampled_from([16, 64, 80, 208, 640]),
    inside=st.sampled_from([16, 32, 64, 80, 144]),
    favourites=st.booleans(),
    parts=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**31),
)


def make(shape: Shape, device: str) -> tuple[Scaled, torch.Tensor, torch.Tensor]:
    """Rows for a norm, the residual and the next norm's weight."""
    torch.manual_seed(shape.seed)
    rows = 1 if shape.favourites else shape.tokens
    x = torch.randn(rows, shape.hidden).expand(shape.tokens, -1).to(device, bf16)
    norm = (torch.randn(shape.hidden) + 2).to(x)
    squares = x.float().square().sum(dim=1, keepdim=True) / shape.parts
    scaled = Scaled(x * norm, squares.expand(-1, shape.parts).contiguous(), EPS)
    return scaled, torch.randn(shape.tokens, shape.hidden).to(x), norm.roll(1)


def weights_of(shape: Shape, device: str) -> ExpertWeights:
    """Matrices that keep the size of what they multiply."""
    e, hidden, inside = shape.num_experts, shape.hidden, shape.inside
    router = torch.randn(e, hidden) / hidden**0.5
    gate_up = torch.randn(e, 2 * inside, hidden) / hidden**0.5
    down = torch.randn(e, hidden, inside) / inside**0.5
    made = (t.to(device, bf16) for t in (router, gate_up, down))
    return ExpertWeights(*made, shape.per_token, normalized=True)


def with_kernel(weights: ExpertWeights, **stacks: Any) -> ExpertWeights:
    routing = Routing(per_token=weights.per_token, normalized=weights.normalized)
    return replace(weights, router=Router.of(weights.router, bf16, routing), **stacks)


def assert_near(found: tuple[torch.Tensor, Scaled], expected: torch.Tensor) -> None:
    """Off by the roundings of the experts' inner rows and of the sum."""
    total, scaled = found
    torch.testing.assert_close(total.float(), expected.float(), rtol=2e-2, atol=5e-2)
    squares = scaled.squares.sum(dim=1)
    torch.testing.assert_close(squares, total.float().square().sum(dim=1), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@kernel_settings(30)
@given(SHAPES)
@example(Shape(1, 1, 4, hidden=16, inside=16))
@example(Shape(50, 2, 4, favourites=True))  # several tiles of an expert
@example(Shape(80, 4, 8))  # tiles of 64
@example(Shape(3, 4, 60, hidden=640, inside=144, parts=3))
def test_experts_equal_their_twin(kernel_device: str, shape: Shape) -> None:
    scaled, residual, norm = make(shape, kernel_device)
    weights = weights_of(shape, kernel_device)
    before = residual.clone()
    expected, _ = add_experts(scaled, weights, residual, norm, EPS)
    found = module.add_experts(scaled, with_kernel(weights), residual, norm, EPS)
    assert_near(found, expected)
    assert torch.equal(found[1].product, found[0] * norm) and found[1].eps == EPS
    assert torch.equal(residual, before)


@pytest.mark.parametrize("copied", [False, True])
def test_tiles_are_copied_or_loaded(
    kernel_device: str, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if copied and not can_copy_tiles(torch.device(kernel_device)):
        pytest.skip("Hopper GPUs alone copy tiles")
    monkeypatch.setattr(expert_rows, "can_copy_tiles", lambda _: copied)
    shape = Shape(20, 2, 8, hidden=208, inside=80)
    scaled, residual, norm = make(shape, kernel_device)
    weights = weights_of(shape, kernel_device)
    expected, _ = add_experts(scaled, weights, residual, norm, EPS)
    assert_near(module.add_experts(scaled, with_kernel(weights), residual, norm, EPS), expected)


@pytest.mark.parametrize("name", ["int8", "e4m3"])
def test_quantized_stacks_are_multiplied(kernel_device: str, name: str) -> None:
    shape = Shape(20, 2, 4, hidden=128, inside=64)
    form = Format(name, stack=(4,))
    codes = [quantized(2 * 64, 128, form, kernel_device), quantized(128, 64, form, kernel_device)]
    scaled, residual, norm = make(shape, kernel_device)
    plain = weights_of(shape, kernel_device)
    gate_up, down = (dequantize(matrix, torch.float32) for matrix in codes)
    expected, _ = add_experts(
        scaled, replace(plain, gate_up=gate_up, down=down), residual, norm, EPS
    )
    gate_up, down = map(arrange, codes)
    found = module.add_experts(
        scaled, with_kernel(plain, gate_up=gate_up, down=down), residual, norm, EPS
    )
    assert_near(found, expected)


def test_an_unused_expert_is_not_read(kernel_device: str) -> None:
    """NaN shows every read."""
    shape = Shape(20, 2, 8, favourites=True)
    scaled, residual, norm = make(shape, kernel_device)
    weights = with_kernel(weights_of(shape, kernel_device))
    expected, _ = module.add_experts(scaled, weights, residual, norm, EPS)
    routed = weights.router.route_few(scaled)
    for expert in set(range(8)) - set(routed.ids.flatten().tolist()):
        weights.gate_up[expert] = weights.down[expert] = torch.nan
    total, _ = module.add_experts(scaled, weights, residual, norm, EPS)
    assert torch.equal(total, expected)


def test_a_token_does_not_depend_on_its_neighbours(kernel_device: str) -> None:
    shape = Shape(40, 3, 8)
    scaled, residual, norm = make(shape, kernel_device)
    weights = with_kernel(weights_of(shape, kernel_device))
    expected, _ = module.add_experts(scaled, weights, residual, norm, EPS)
    scaled.product[5] = torch.nan
    total, _ = module.add_experts(scaled, weights, residual, norm, EPS)
    kept = [row for row in range(40) if row != 5]
    assert torch.equal(total[kept], expected[kept])


def test_no_result_depends_on_the_order_of_an_experts_pairs(kernel_device: str) -> None:
    """Pairs take their places by atomic additions, in any order; here tiles get other pairs.

    Interpreted, a tile's product is NumPy's, which on some CPUs rounds by a row's place.
    """
    shape = Shape(50, 2, 4, favourites=True)
    scaled, _, _ = make(shape, kernel_device)
    weights = with_kernel(weights_of(shape, kernel_device))
    routed = weights.router.route_few(scaled)
    order, bounds = routed.groups.order, routed.groups.bounds.tolist()
    turned = torch.cat([order[a:b].flip(0) for a, b in itertools.pairwise(bounds)])
    assert not torch.equal(turned, order)
    found = []
    for groups in (routed.groups, routed.groups._replace(order=turned)):
        inner = module.expert_gates(scaled, weights.gate_up, groups, 2)
        parts = module.expert_parts(inner, weights.down, groups, routed.shares)
        found.append((inner, parts))
    exact = dict(rtol=0, atol=0) if kernel_device == "cuda" else dict(rtol=0.01, atol=1e-3)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **exact)
