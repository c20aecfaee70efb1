"""Experts of many pairs: the counting sort, and the products on large tiles.

On a device, or interpreted where there is none.
"""

from dataclasses import replace

import pytest
import torch
from conftest import kernel_settings
from hypothesis import example, given
from hypothesis import strategies as st
from quantized import Format, quantized
from test_experts_kernel import Inputs, Shape, assert_near, make, poison_rows_of_pairs

from nanovllm.kernels.plain.quantized_linear import dequantize
from nanovllm.kernels.table import PLAIN

pytestmark = pytest.mark.usefixtures("one_thread")

HALF = torch.float16
SHAPES = st.builds(
    Shape,
    tokens=st.integers(16, 200),
    per_token=st.integers(1, 3),
    num_experts=st.sampled_from([3, 4]),
    hidden=st.sampled_from([16, 64, 80, 144]),
    inside=st.sampled_from([16, 64, 80, 144]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    favourites=st.booleans(),
    below=st.integers(0, 1),
    above=st.integers(0, 1),
    seed=st.integers(0, 2**31),
)


def many(inputs: Inputs) -> torch.Tensor:
    """The layer, by the kernels for many pairs."""
    from nanovllm.kernels.triton.experts import many_pairs
    from nanovllm.kernels.triton.experts.experts import experts

    x, _, down, ids, _, num_experts = inputs
    assert many_pairs.takes(x, down, ids.numel(), num_experts)
    return experts(*inputs)


@pytest.mark.slow
@kernel_settings(12)
@given(SHAPES)
@example(Shape(128, 1, 4, dtype=HALF, favourites=True))  # one expert has all rows
@example(Shape(300, 2, 4, hidden=208, inside=144, dtype=HALF, below=1, above=1))
@example(Shape(20, 2, 8, hidden=80, inside=80, dtype=HALF))  # small tiles
def test_many_pairs_equal_the_definition(kernel_device: str, shape: Shape) -> None:
    inputs = make(shape, kernel_device)
    before = [t.clone() for t in inputs[:-1]]
    assert_near(many(inputs), inputs)
    assert all(map(torch.equal, before, inputs[:-1])), "inputs were changed"


@pytest.mark.parametrize("copied", [True, False])
def test_a_token_of_many_does_not_depend_on_its_neighbours(
    copied: bool, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles have rows of other tokens, and of the next expert."""
    from nanovllm.kernels.triton.experts import many_pairs

    if not copied:
        monkeypatch.setattr(many_pairs, "can_copy_tiles", lambda device: False)
    inputs = make(Shape(130, 3, 4, hidden=80, inside=48, dtype=HALF), kernel_device)
    whole = many(inputs)
    assert_near(whole, inputs)
    inputs[0][5] = torch.nan
    kept = [row for row in range(130) if row != 5]
    assert torch.equal(many(inputs)[kept], whole[kept])


def test_an_expert_without_pairs_of_many_is_not_read(kernel_device: str) -> None:
    """NaN shows every read."""
    inputs = make(Shape(130, 2, 5, dtype=HALF, favourites=True), kernel_device)
    expected = many(inputs)
    _, gate_up, down, ids, *_ = inputs
    unused = set(range(5)) - set(ids.flatten().tolist())
    assert len(unused) == 3
    for expert in unused:
        gate_up[expert] = down[expert] = torch.nan
    assert torch.equal(many(inputs), expected)


def test_many_pairs_of_other_ranks_cost_no_work(
    kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither written nor read: the memory's earlier values show both."""
    inputs = make(Shape(130, 3, 8, dtype=HALF, below=3, above=2), kernel_device)
    made = poison_rows_of_pairs(390, monkeypatch)
    assert_near(many(inputs), inputs)
    ids = inputs[3].flatten()
    here = (ids >= 0) & (ids < 3)
    assert 50 < int(here.sum()) < 340
    inner, parts = made
    sorted_here = here[ids.sort(stable=True)[1]]
    for rows, mask in ((inner, sorted_here), (parts, here)):
        assert bool((rows[~mask] == 77).all()) and not bool((rows[mask] == 77).any())


@pytest.mark.parametrize(("copied", "least"), [(True, 4), (False, 32)])
def test_few_pairs_and_other_rows_have_other_kernels(
    copied: bool, least: int, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number counts all pairs, as if they were those of this rank's experts."""
    from nanovllm.kernels.triton.experts import many_pairs

    def takes(dtype: torch.dtype, hidden: int, inside: int, pairs: int) -> bool:
        x, down = torch.empty(1, hidden, dtype=dtype), torch.empty(2, hidden, inside, dtype=dtype)
        return many_pairs.takes(x, down, pairs, 128)

    monkeypatch.setattr(many_pairs, "can_copy_tiles", lambda device: copied)
    for dtype in (HALF, torch.bfloat16):
        assert takes(dtype, 64, 48, least * 128) and not takes(dtype, 64, 48, least * 128 - 1)
    assert not takes(torch.float32, 64, 48, 1000 * 128)
    assert not takes(HALF, 72, 48, 1000 * 128) and not takes(HALF, 64, 40, 1000 * 128)


def test_tiles_of_many_pairs_are_large() -> None:
    from nanovllm.kernels.triton.experts.many_pairs import rows_of_tile

    assert rows_of_tile(64 * 128, 128) == 128 and rows_of_tile(64 * 128 - 1, 128) == 64


def test_many_pairs_of_quantized_experts_have_other_kernels(kernel_device: str) -> None:
    from nanovllm.kernels.triton.experts.experts import experts
    from nanovllm.kernels.triton.linear.quantized_linear import arrange

    shape = Shape(70, 2, 4, hidden=64, inside=64, dtype=HALF)
    x, _, _, ids, shares, e = make(shape, kernel_device)
    gate_up = quantized(128, 64, Format(stack=(4,)), kernel_device)
    down = quantized(64, 64, Format(stack=(4,), seed=1), kernel_device)
    out = experts(x, arrange(gate_up), arrange(down), ids, shares, e)
    assert_near(out, (x, dequantize(gate_up), dequantize(down), ids, shares, e))


@pytest.mark.sampled
@pytest.mark.parametrize("tokens", [1, 5, 100, 300, 700])
@pytest.mark.parametrize("num_experts", [3, 62, 63])  # with two more, a power of two or not
@pytest.mark.parametrize("favourites", [False, True])
@pytest.mark.parametrize(("elsewhere", "rows"), [((0, 0), 128), ((1, 0), 64), ((1, 1), 128)])
def test_tiles_have_all_pairs_of_their_experts_in_order(
    tokens: int, num_experts: int, favourites: bool, elsewhere: tuple[int, int], rows: int,
    kernel_device: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The grid is chosen before the pairs' experts are known, and must be large enough for any."""
    from nanovllm.kernels.triton.experts import grouping
    from nanovllm.kernels.triton.experts.grouping import tile_pairs

    monkeypatch.setattr(grouping, "SCANNED", 4)  # of up to 11 chunks

    below, above = elsewhere
    shape = Shape(tokens, 2, num_experts, favourites=favourites, below=below, above=above)
    ids, num_here = make(shape, kernel_device)[3], num_experts - below - above
    pairs = tile_pairs(ids, num_here, rows)
    order = ids.flatten().clamp(-1, num_here).sort(stable=True)[1]
    assert torch.equal(pairs.order.long(), order)
    assert int(pairs.num_tiles) <= len(pairs.tiles)
    expected = []
    first = int((ids < 0).sum())
    for expert, count in enumerate((ids == e).sum().item() for e in range(num_here)):
        expected += [[expert, first + at, first + count] for at in range(0, int(count), rows)]
        first += int(count)
    assert pairs.tiles[: int(pairs.num_tiles)].tolist() == expected


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", [100, 700])
@pytest.mark.parametrize("above", [0, 100])
def test_a_graph_computes_many_pairs_of_its_replay(above: int, tokens: int) -> None:
    """Rows take other experts in the replay, and there are other tiles."""
    shape = Shape(tokens, 8, 128, 2048, 768, torch.bfloat16, above=above)
    first, other = make(shape, "cuda"), make(replace(shape, seed=1, favourites=True), "cuda")
    static = (*(t.clone() for t in first[:-1] if isinstance(t, torch.Tensor)), 128)
    many(static)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = many(static)  # type: ignore[arg-type]
    for inputs in (other, first):
        for target, source in zip(static[:-1], inputs[:-1], strict=True):
            target.copy_(source)
        graph.replay()
        torch.testing.assert_close(out, PLAIN.experts(*inputs), rtol=5e-2, atol=5e-2)
