"""Experts as Triton's grouped products, against the plain loop and against its definition.

On a device, or interpreted where there is none.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import kernel_settings
from hypothesis import example, given
from hypothesis import strategies as st
from quantized import Format, quantized

from nanovllm.kernels.plain.quantized_linear import dequantize
from nanovllm.kernels.table import PLAIN

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Shape:
    """T tokens that take K of E experts; all tokens take `favourites` of them.

    The first `below` and the last `above` experts belong to other ranks.
    """

    tokens: int
    per_token: int
    num_experts: int
    hidden: int = 64
    inside: int = 32
    dtype: torch.dtype = torch.float32
    favourites: bool = False
    below: int = 0
    above: int = 0
    seed: int = 0


SHAPES = st.builds(
    Shape,
    tokens=st.integers(1, 70),
    per_token=st.integers(1, 4),
    num_experts=st.sampled_from([4, 5, 8, 60]),
    hidden=st.sampled_from([16, 64, 80, 200]),
    inside=st.sampled_from([8, 24, 64, 72]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    favourites=st.booleans(),
    below=st.integers(0, 2),
    above=st.integers(0, 1),
    seed=st.integers(0, 2**31),
)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]


def make(shape: Shape, device: str) -> Inputs:
    """Rows, both weights, the rows' experts and shares, and the number of experts."""
    torch.manual_seed(shape.seed)
    e, hidden, inside = shape.num_experts, shape.hidden, shape.inside
    here = slice(shape.below, e - shape.above)
    x = torch.randn(shape.tokens, hidden)
    gate_up = torch.randn(e, 2 * inside, hidden) / hidden**0.5
    down = torch.randn(e, hidden, inside) / inside**0.5
    scores = torch.randn(1 if shape.favourites else shape.tokens, e).expand(shape.tokens, e)
    shares, ids = scores.softmax(-1).topk(shape.per_token, dim=-1)
    x, gate_up, down = (t.to(device, shape.dtype) for t in (x, gate_up[here], down[here]))
    return x, gate_up, down, (ids - shape.below).to(device), shares.to(device), e


def one_by_one(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor,
    shares: torch.Tensor, num_experts: int,
) -> torch.Tensor:  # fmt: skip
    """The definition, in float64: one token and one of its experts at a time."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    x, gate_up, down, shares = (t.cpu().double() for t in (x, gate_up, down, shares))
    for row in range(len(x)):
        for expert, share in zip(ids[row].tolist(), shares[row], strict=True):
            if 0 <= expert < len(down):
                gate, up = (gate_up[expert] @ x[row]).chunk(2)
                out[row] += share * (down[expert] @ (F.silu(gate) * up))
    return out


def assert_near(out: torch.Tensor, inputs: Inputs) -> None:
    assert out.dtype == inputs[0].dtype and out.shape == inputs[0].shape
    error = 1e-4 if out.dtype == torch.float32 else 5e-2  # bfloat16: two roundings
    torch.testing.assert_close(out.cpu().double(), one_by_one(*inputs), rtol=error, atol=error)


@pytest.mark.slow
@kernel_settings(30)
@given(SHAPES)
@example(Shape(1, 1, 1))
@example(Shape(130, 2, 4, favourites=True))  # tiles of 64, several for each expert
@example(Shape(64, 2, 4, dtype=torch.bfloat16))
@example(Shape(3, 8, 128, hidden=16, inside=8))
@example(Shape(70, 4, 4, below=1, above=1))
@example(Shape(5, 2, 8, below=7))  # most tokens have no expert of this rank
def test_experts_equal_their_definition(kernel_device: str, shape: Shape) -> None:
    from nanovllm.kernels.triton.experts.experts import experts

    inputs = make(shape, kernel_device)
    before = [t.clone() for t in inputs[:-1]]
    assert_near(PLAIN.experts(*inputs), inputs)
    assert_near(experts(*inputs), inputs)
    assert all(map(torch.equal, before, inputs[:-1])), "inputs were changed"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "triton"])
def test_a_token_does_not_depend_on_its_neighbours(name: str, kernel_device: str) -> None:
    """Tiles have rows of other tokens; a row changes only by the rounding of another shape."""
    from nanovllm.kernels.triton.experts.experts import experts

    function = PLAIN.experts if name == "plain" else experts
    x, gate_up, down, ids, shares, e = make(Shape(40, 3, 8), kernel_device)
    whole = function(x, gate_up, down, ids, shares, e)
    for rows in (slice(0, 1), slice(7, 8), slice(10, 35)):
        alone = function(x[rows], gate_up, down, ids[rows], shares[rows], e)
        torch.testing.assert_close(alone, whole[rows], rtol=1e-5, atol=1e-5)
    x[5] = torch.nan
    kept = [row for row in range(40) if row != 5]
    poisoned = function(x, gate_up, down, ids, shares, e)
    torch.testing.assert_close(poisoned[kept], whole[kept], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["plain", "triton"])
def test_an_unused_expert_is_not_read(name: str, kernel_device: str) -> None:
    """The cost is that of the active ones; NaN shows every other read."""
    from nanovllm.kernels.triton.experts.experts import experts

    function = PLAIN.experts if name == "plain" else experts
    x, gate_up, down, ids, shares, e = make(Shape(20, 2, 8, favourites=True), kernel_device)
    expected = function(x, gate_up, down, ids, shares, e)
    for expert in set(range(8)) - set(ids.flatten().tolist()):
        gate_up[expert] = down[expert] = torch.nan
    assert torch.equal(function(x, gate_up, down, ids, shares, e), expected)


@pytest.mark.parametrize("name", ["plain", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_the_experts_add_up(name: str, dtype: torch.dtype, kernel_device: str) -> None:
    """Parts of two ranks, with three and five experts; a token without any gets zeros."""
    from nanovllm.kernels.triton.experts.experts import experts

    function = PLAIN.experts if name == "plain" else experts
    whole = make(Shape(33, 3, 8, dtype=dtype), kernel_device)
    x, gate_up, down, ids, shares, e = whole
    first, last = (
        function(x, gate_up[part], down[part], ids - part.start, shares, e)
        for part in (slice(0, 3), slice(3, 8))
    )
    assert_near(first + last, whole)
    unused = function(x, gate_up[:2], down[:2], ids + 100, shares, e)
    assert torch.equal(unused, torch.zeros_like(x))
    assert torch.equal(function(x, gate_up[:2], down[:2], ids - 100, shares, e), unused)


def poison_rows_of_pairs(num_pairs: int, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Fill new memory that has a row for each pair; it is returned once it is made."""
    made: list[torch.Tensor] = []
    new_empty = torch.Tensor.new_empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        empty: torch.Tensor = new_empty(*args, **kwargs)
        if len(empty) == num_pairs and empty.is_floating_point():
            made.append(empty.fill_(77.0))
        return empty

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    return made


def test_pairs_of_other_ranks_cost_no_work(
    kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither written nor read: the memory's earlier values show both."""
    from nanovllm.kernels.triton.experts.experts import experts

    inputs = make(Shape(20, 3, 8, below=3, above=2), kernel_device)
    made = poison_rows_of_pairs(60, monkeypatch)
    assert_near(experts(*inputs), inputs)
    ids = inputs[3].flatten()
    here = (ids >= 0) & (ids < 3)
    assert len(made) == 3 and 10 < int(here.sum()) < 40
    for rows in made:
        assert bool((rows[~here] == 77).all()) and not bool((rows[here] == 77).any())


def test_tiles_are_small_for_few_pairs_of_an_expert(kernel_device: str) -> None:
    """Chosen by all pairs, as if they were those of this rank's experts."""
    from nanovllm.kernels.triton.experts.experts import group

    ids = make(Shape(64, 2, 32), kernel_device)[3]
    assert group(ids, 32, 32).block_m == group(ids - 4, 4, 32).block_m == 16
    assert group(ids, 4, 4).block_m == 64


@pytest.mark.parametrize("tokens", [1, 5, 64, 200])
@pytest.mark.parametrize("favourites", [False, True])
@pytest.mark.parametrize("elsewhere", [(0, 0), (3, 0), (2, 3)])
def test_tiles_cover_all_pairs(
    tokens: int, favourites: bool, elsewhere: tuple[int, int], kernel_device: str
) -> None:
    """The grid is chosen before the pairs' experts are known, and must be large enough for any."""
    from nanovllm.kernels.triton.experts.experts import group

    below, above = elsewhere
    shape = Shape(tokens, 2, 7, favourites=favourites, below=below, above=above)
    ids, num_here = make(shape, kernel_device)[3], 7 - below - above
    groups = group(ids, num_here, 7)
    bounds = groups.bounds.tolist()
    assert bounds[0] == (ids < 0).sum() and bounds[-1] == (ids < num_here).sum()
    assert groups.tile_ends[-1] <= groups.num_tiles
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        pairs = groups.order[start:stop]
        assert bool((ids.flatten()[pairs] == expert).all())
    assert sorted(groups.order.tolist()) == list(range(ids.numel()))


QUANTIZED = [
    Format(), Format("e4m3", (32, 64)), Format("int4", (1, 64), zeros=True), Format("int4", (1, 0)),
    Format("int4", (1, 20)),
]  # fmt: skip


@pytest.mark.parametrize("form", QUANTIZED)
@pytest.mark.parametrize("tokens", [3, 70])
def test_quantized_experts_are_those_of_their_weights(
    form: Format, tokens: int, kernel_device: str
) -> None:
    """Both sizes of tiles; a part of the experts is on other ranks, and inputs have an order."""
    from nanovllm.kernels.triton.experts.experts import experts, group
    from nanovllm.kernels.triton.linear.quantized_linear import arrange

    shape = Shape(tokens, 3, 6, hidden=200, inside=72, below=1, above=1)
    x, _, _, ids, shares, e = make(shape, kernel_device)
    assert group(ids, 4, 6).block_m == (64 if tokens == 70 else 16)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1)).to(kernel_device)
    stacks = replace(form, stack=(4,))
    gate_up = quantized(144, 200, stacks, kernel_device, order=order)
    down = quantized(200, 72, replace(stacks, seed=1), kernel_device)
    out = experts(x, arrange(gate_up), arrange(down), ids, shares, e)
    weights = torch.empty(4, 144, 200, device=kernel_device)
    weights[:, :, order] = dequantize(gate_up)
    assert_near(out, (x, weights, dequantize(down), ids, shares, e))


@pytest.mark.cuda
@pytest.mark.parametrize("above", [0, 100])
def test_a_graph_computes_the_experts_of_its_replay(above: int) -> None:
    """Rows take other experts in the replay."""
    from nanovllm.kernels.triton.experts.experts import experts

    shape = Shape(16, 8, 128, 2048, 768, torch.bfloat16, above=above)
    first, other = make(shape, "cuda"), make(replace(shape, seed=1), "cuda")
    static = [t.clone() for t in first[:-1]]
    experts(*static, 128)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(*static, 128)
    for target, source in zip(static, other[:-1], strict=True):
        target.copy_(source)
    graph.replay()
    torch.testing.assert_close(out, PLAIN.experts(*other), rtol=5e-2, atol=5e-2)
