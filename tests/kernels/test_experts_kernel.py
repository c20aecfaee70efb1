"""Experts as Triton's grouped products, against the plain loop and against its definition.

On a device, or interpreted where there is none.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from conftest import kernel_settings
from hypothesis import example, given
from hypothesis import strategies as st

from nanovllm.kernels import plain

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Shape:
    """T tokens that take K of E experts; `favourites` of them are taken by all tokens alike."""

    tokens: int
    per_token: int
    num_experts: int
    hidden: int = 64
    inside: int = 32
    dtype: torch.dtype = torch.float32
    favourites: bool = False
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
    seed=st.integers(0, 2**31),
)


def make(shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
    """Rows, both weights, and which experts the rows take in which shares."""
    torch.manual_seed(shape.seed)
    e, hidden, inside = shape.num_experts, shape.hidden, shape.inside
    x = torch.randn(shape.tokens, hidden)
    gate_up = torch.randn(e, 2 * inside, hidden) / hidden**0.5
    down = torch.randn(e, hidden, inside) / inside**0.5
    scores = torch.randn(1 if shape.favourites else shape.tokens, e).expand(shape.tokens, e)
    shares, ids = scores.softmax(-1).topk(shape.per_token, dim=-1)
    x, gate_up, down = (t.to(device, shape.dtype) for t in (x, gate_up, down))
    return x, gate_up, down, ids.to(device), shares.to(device)


def one_by_one(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor,
    shares: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The definition, in float64: every token by itself, each of its experts in turn."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    x, gate_up, down, shares = (t.cpu().double() for t in (x, gate_up, down, shares))
    for row in range(len(x)):
        for expert, share in zip(ids[row].tolist(), shares[row], strict=True):
            gate, up = (gate_up[expert] @ x[row]).chunk(2)
            out[row] += share * (down[expert] @ (F.silu(gate) * up))
    return out


def assert_near(out: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> None:
    assert out.dtype == inputs[0].dtype and out.shape == inputs[0].shape
    error = 1e-4 if out.dtype == torch.float32 else 5e-2  # bfloat16: two roundings on the way
    torch.testing.assert_close(out.cpu().double(), one_by_one(*inputs), rtol=error, atol=error)


@kernel_settings(30)
@given(SHAPES)
@example(Shape(1, 1, 1))
@example(Shape(130, 2, 4, favourites=True))  # tiles of 64, several to an expert
@example(Shape(64, 2, 4, dtype=torch.bfloat16))
@example(Shape(3, 8, 128, hidden=16, inside=8))
def test_experts_differ_from_their_definition(kernel_device: str, shape: Shape) -> None:
    from nanovllm.kernels.experts import experts

    inputs = make(shape, kernel_device)
    before = [t.clone() for t in inputs]
    assert_near(plain.experts(*inputs), inputs)
    assert_near(experts(*inputs), inputs)
    assert all(map(torch.equal, before, inputs)), "inputs were changed"


@pytest.mark.parametrize("name", ["plain", "triton"])
def test_a_token_depends_on_its_neighbours(name: str, kernel_device: str) -> None:
    """A row of another token, or of none, in a tile; more than the rounding of another shape."""
    from nanovllm.kernels.experts import experts

    function = plain.experts if name == "plain" else experts
    x, gate_up, down, ids, shares = make(Shape(40, 3, 8), kernel_device)
    whole = function(x, gate_up, down, ids, shares)
    for rows in (slice(0, 1), slice(7, 8), slice(10, 35)):
        alone = function(x[rows], gate_up, down, ids[rows], shares[rows])
        torch.testing.assert_close(alone, whole[rows], rtol=1e-5, atol=1e-5)
    x[5] = torch.nan
    kept = [row for row in range(40) if row != 5]
    poisoned = function(x, gate_up, down, ids, shares)
    torch.testing.assert_close(poisoned[kept], whole[kept], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["plain", "triton"])
def test_an_expert_that_nobody_takes_is_read(name: str, kernel_device: str) -> None:
    """The cost would not be that of the active ones; NaN shows what is touched."""
    from nanovllm.kernels.experts import experts

    function = plain.experts if name == "plain" else experts
    x, gate_up, down, ids, shares = make(Shape(20, 2, 8, favourites=True), kernel_device)
    expected = function(x, gate_up, down, ids, shares)
    for expert in set(range(8)) - set(ids.flatten().tolist()):
        gate_up[expert] = down[expert] = torch.nan
    assert torch.equal(function(x, gate_up, down, ids, shares), expected)


@pytest.mark.parametrize("tokens", [1, 5, 64, 200])
@pytest.mark.parametrize("favourites", [False, True])
def test_tiles_do_not_cover_the_pairs(tokens: int, favourites: bool, kernel_device: str) -> None:
    """The grid is chosen before anyone knows how the pairs fall: it must never be too small."""
    from nanovllm.kernels.experts import group

    ids = make(Shape(tokens, 2, 7, favourites=favourites), kernel_device)[3]
    groups = group(ids, 7)
    assert groups.ends[-1] == ids.numel() and groups.tile_ends[-1] <= groups.num_tiles
    starts = [0, *groups.ends.tolist()][:-1]
    for expert, (start, stop) in enumerate(zip(starts, groups.ends.tolist(), strict=True)):
        pairs = groups.order[start:stop]
        assert bool((ids.flatten()[pairs] == expert).all())
    assert sorted(groups.order.tolist()) == list(range(ids.numel()))


@pytest.mark.cuda
def test_a_graph_replays_the_experts_of_its_capture() -> None:
    """Other rows go to other experts: what is replayed must look again."""
    from nanovllm.kernels.experts import experts

    first = make(Shape(16, 8, 128, 2048, 768, torch.bfloat16), "cuda")
    other = make(Shape(16, 8, 128, 2048, 768, torch.bfloat16, seed=1), "cuda")
    static = [t.clone() for t in first]
    experts(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(*static)
    for target, source in zip(static, other, strict=True):
        target.copy_(source)
    graph.replay()
    torch.testing.assert_close(out, plain.experts(*other), rtol=5e-2, atol=5e-2)
