"""Attention in one order of sums: a query gets equal bits from every step that computes it.

Decode and prefill are compared bit by bit, and with their twins as the other kernels are. The
interpreter's products and sums depend on shapes as those of a GPU do (`gpu_sums`).
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import kernel_settings
from gpu_sums import sums_of_a_gpu  # noqa: F401  a fixture
from hypothesis import given
from hypothesis import strategies as st
from test_attention_kernels import (
    BF16,
    CAPPED,
    FP16,
    QUANTIZED,
    TILE,
    Paged,
    Shape,
    assert_decodes_as_its_twin,
    assert_prefills_as_its_twin,
    uninitialized_memory_is_nan,  # noqa: F401  a fixture for all tests here too
)

from nanovllm.kernels.kv_layer import KVLayer

pytestmark = pytest.mark.usefixtures("one_thread", "sums_of_a_gpu")


def wide_rows(num_rows: int, size: int, like: torch.Tensor) -> torch.Tensor:
    """Rows of float32 for outputs. In 16 bits, most sums in another order are equal."""
    return like.new_empty(num_rows, size, dtype=torch.float32)


class Ordered(Paged):
    """Tensors of a shape, for the kernels with one order."""

    plan: Any  # of the last decode

    def decode(self, layers: int = 1) -> torch.Tensor:
        return ordered_decode(self, self.q, self.lens, self.tables, self.shape.num_queries, layers)

    def prefill(self, use_cache: bool) -> torch.Tensor:
        tables = self.tables if use_cache else None
        kv = self.kernel_layer() if use_cache else self.layer(torch.empty(0), torch.empty(0))
        keys = torch.full((2, *self.k.shape), torch.nan).to(self.k) if use_cache else None
        k, v = (self.k, self.v) if keys is None else keys
        return ordered_prefill(self, self.q, k, v, kv, self.cu_q, self.cu_k, tables)


def ordered_decode(
    paged: Ordered, q: torch.Tensor, lens: torch.Tensor, tables: torch.Tensor,
    num_queries: int = 1, layers: int = 1, slots: int | None = None, wide: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Layers with one plan: a second one reads the counters that the first one has reset."""
    from nanovllm.kernels.triton.attention import decode_tiles, ordered_plan
    from nanovllm.kernels.triton.attention import ordered_decode as kernels

    shape = paged.shape
    heads = (shape.kv_heads * shape.group, shape.kv_heads, shape.head_dim)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered_plan, "PROGRAMS_PER_MULTIPROCESSOR", shape.programs)
        patch.setattr(ordered_plan, "num_multiprocessors", lambda device: shape.kv_heads)
        patch.setattr(ordered_plan, "HALF", 1 << 20)
        if slots is not None:
            size = 4 * num_queries * heads[0] * heads[2]
            patch.setattr(ordered_plan, "SLOTS_BYTES", slots * size)
        plan = ordered_plan.plan_ordered_decode(
            lens, tables, heads, shape.block_size, shape.copies_tiles, num_queries
        )
    paged.plan = plan
    torch.zeros(1, device=paged.device)  # as in a step, a kernel lies between
    outs = []
    for _ in range(layers):
        with paged.conversion(decode_tiles), pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "rows_with_room", wide_rows if wide else kernels.rows_with_room)
            outs.append(kernels.ordered_decode(q, paged.kernel_layer(), plan))
        assert not plan.arrivals.any(), "the counters are not reset for the next layer"
    assert not outs[0].isnan().any(), "it read unowned memory, or did not write a result"
    assert torch.equal(outs[0], outs[-1]), "the second layer differs from the first"
    return outs[0]


def ordered_prefill(
    paged: Paged, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KVLayer,
    cu_q: torch.Tensor, cu_k: torch.Tensor, tables: torch.Tensor | None, wide: bool = False,
) -> torch.Tensor:  # fmt: skip
    from nanovllm.kernels.triton.attention import ordered_prefill as kernels
    from nanovllm.kernels.triton.attention.prefill_plan import plan_prefill
    from nanovllm.kernels.triton.common import can_copy_tiles

    plan = plan_prefill(cu_q, cu_k, tables, len(q))
    plan.copies_tiles = paged.shape.copies_tiles and can_copy_tiles(q.device)
    with paged.conversion(kernels), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "rows_with_room", wide_rows if wide else kernels.rows_with_room)
        return kernels.ordered_prefill(q, k, v, kv, plan)


class Steps:
    """Steps over tokens of sequences whose keys and values are all in the cache."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.paged = Ordered(replace(shape, queries=shape.contexts), device)
        self.begins = [0, *itertools.accumulate(shape.contexts)]
        self.device = device

    def int32(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def rows(self, parts: list[tuple[int, int, int]]) -> torch.Tensor:
        """The rows of all tokens' queries that are those of parts (sequence, from, to)."""
        ranges = [range(self.begins[i] + start, self.begins[i] + end) for i, start, end in parts]
        return torch.tensor([*itertools.chain(*ranges)], device=self.device)

    def prefill(self, *parts: tuple[int, int, int], own: bool = False) -> torch.Tensor:
        """Compute parts (sequence, from, to) in one step; from the step's `own` keys if they are
        whole sequences."""
        paged, rows = self.paged, self.rows([*parts])
        cu_q = self.int32([0, *itertools.accumulate(end - start for _, start, end in parts)])
        cu_k = self.int32([0, *itertools.accumulate(end for _, _, end in parts)])
        if own:
            empty = paged.layer(torch.empty(0), torch.empty(0))
            k, v = paged.k[rows], paged.v[rows]
            return ordered_prefill(paged, paged.q[rows], k, v, empty, cu_q, cu_k, None, wide=True)
        nothing = torch.full((2, len(rows), *paged.k.shape[1:]), torch.nan).to(paged.k)
        tables = paged.tables[[i for i, _, _ in parts]]
        kv = paged.kernel_layer()
        k, v = nothing
        return ordered_prefill(paged, paged.q[rows], k, v, kv, cu_q, cu_k, tables, wide=True)

    def decode(
        self, *parts: tuple[int, int, int], programs: int = 7, slots: int | None = None
    ) -> torch.Tensor:
        """Compute parts (sequence, from, to) of a few tokens; those of shorter parts are last."""
        most = max(end - start for _, start, end in parts)
        rows, lens = [], []
        for i, start, end in parts:
            some = list(range(start, end))
            rows += [self.begins[i] + n for n in some] + [0] * (most - len(some))
            lens += [n + 1 for n in some] + [0] * (most - len(some))
        self.paged.shape = replace(self.paged.shape, programs=programs)
        tables = self.paged.tables[[i for i, _, _ in parts]]
        seen = self.int32(lens)
        q = self.paged.q[torch.tensor(rows, device=self.device)]
        out = ordered_decode(self.paged, q, seen, tables, most, slots=slots, wide=True)
        return out[seen > 0]


SHAPES = [
    Shape([1100, 257], dtype=BF16, head_dim=128, block_size=64, kv_heads=1),
    Shape([530, 300], dtype=FP16, group=7, block_size=16, kv_heads=1, window=100),
    Shape([600, 256], dtype=BF16, group=1, head_dim=80, block_size=48, soft_cap=2.0, sinks=True),
    Shape([300, 257], group=8, kv_heads=1, block_size=256, sinks=True, window=280),
    Shape([300, 130], dtype=BF16, head_dim=256, group=4, kv_heads=1, block_size=128),
    Shape([600, 256], dtype=BF16, block_size=64, head_dim=128, quantized=True, kv_heads=1),
    Shape([530, 40], dtype=FP16, block_size=32, quantized=True, converted=True, window=280,
          sinks=True, kv_heads=1, group=3),
]  # fmt: skip


@pytest.mark.sampled(share=0.6)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_query_gets_equal_bits_from_every_step(kernel_device: str, shape: Shape) -> None:
    """Alone, among others, in parts of prompts of any size, after a hit, and with drafts."""
    steps = Steps(shape, kernel_device)
    n, m = shape.contexts
    whole = steps.prefill((0, 0, n), own=not shape.quantized)
    ends = [e for e in (1, 64, 255, 256, 257, 512, 513, n) if e <= n]
    alone = [steps.decode((0, end - 1, end)) for end in ends]
    expected = whole[[end - 1 for end in ends]]
    assert torch.equal(torch.cat(alone), expected), "alone"
    rows = [(0, end - 1, end) for end in ends]
    for programs in (1, 3, 20):
        among = steps.decode((1, m - 1, m), *rows, (1, 0, 1), programs=programs)
        assert torch.equal(among[1:-1], expected), f"among others, {programs} programs"
    drafts = steps.decode((1, 0, 2), (0, n - 4, n), (0, 255, 258), programs=5)
    assert torch.equal(drafts[2:6], whole[n - 4 :]) and torch.equal(drafts[6:], whole[255:258])
    for start, end in ((n - 1, n), (250, 257), (n - 65, n), (n // 64 * 64 - 1, n // 64 * 64)):
        part = steps.prefill((1, 0, 3), (0, start, end), (1, m - 1, m))
        assert torch.equal(part[3:-1], whole[start:end]), f"part from {start} to {end}"


def test_small_queries_of_codes_do_not_depend_on_large_ones(kernel_device: str) -> None:
    """In float16 they are cut off where a neighbour's power of two is the largest."""
    steps = Steps(Shape([40], dtype=BF16, quantized=True, group=4, kv_heads=1), kernel_device)
    q = steps.paged.q
    q[:] = torch.randn_like(q) * 2.0 ** (40 * torch.randint(2, (*q.shape[:2], 1)).to(q.device))
    whole = steps.prefill((0, 0, 40))
    alone = torch.cat([steps.decode((0, n, n + 1)) for n in range(30, 40)])
    assert torch.equal(alone, whole[30:])


@pytest.mark.parametrize("slots", [1, 11, 12, None])
def test_without_room_for_chunks_no_row_is_divided(kernel_device: str, slots: int | None) -> None:
    shape = Shape([1500, 700], dtype=BF16, kv_heads=1, group=1)
    steps = Steps(shape, kernel_device)
    expected = [steps.prefill((i, n - 1, n)) for i, n in enumerate(shape.contexts)]
    parts = [(0, 1499, 1500), (1, 699, 700), (1, 699, 700)]
    out = steps.decode(*parts, programs=9, slots=slots)
    assert torch.equal(out, torch.cat([*expected, expected[1]]))
    # 24 + 11 + 11 tiles: four of them take a slot.
    starts = steps.paged.plan.starts
    assert torch.equal(starts[:, 1], starts[:, 3]) == (slots in (1, 11))


@pytest.mark.slow
@kernel_settings(8)
@given(
    st.builds(
        Shape, contexts=st.lists(st.integers(1, 400), min_size=1, max_size=3),
        programs=st.sampled_from([1, 3, 8, 20]), quantized=st.just(False), **CAPPED,
    )
    | st.builds(
        Shape, contexts=st.lists(st.integers(1, 400), min_size=1, max_size=3),
        programs=st.sampled_from([1, 3, 8, 20]), **QUANTIZED,
    ),
    st.integers(1, 5),
)  # fmt: skip
def test_any_decode_has_the_bits_of_prefills(kernel_device: str, shape: Shape, count: int) -> None:
    """Of the last tokens of some sequences, in one step and in one for each."""
    steps = Steps(shape, kernel_device)
    parts = [(i, max(0, n - count), n) for i, n in enumerate(shape.contexts)]
    alone = torch.cat([steps.prefill(part) for part in parts])
    assert torch.equal(steps.decode(*parts, programs=shape.programs), alone)
    assert torch.equal(steps.prefill(*parts), alone)


@kernel_settings(40)
@given(
    st.lists(st.integers(0, 1200), min_size=1, max_size=9), st.integers(1, 30), st.integers(1, 60)
)
def test_every_chunk_is_in_one_share(
    kernel_device: str, lens: list[int], programs: int, slots: int
) -> None:
    """It has a slot of its own if its row is divided, and the row's first program counts it."""
    from nanovllm.kernels.triton.attention import ordered_plan
    from nanovllm.kernels.triton.attention.ordered import CHUNK

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered_plan, "PROGRAMS_PER_MULTIPROCESSOR", programs)
        patch.setattr(ordered_plan, "num_multiprocessors", lambda device: 1)
        patch.setattr(ordered_plan, "SLOTS_BYTES", slots * 4 * 16)
        contexts = torch.tensor(lens, dtype=torch.int32, device=kernel_device)
        tables = torch.zeros(len(lens), 100, dtype=torch.int32, device=kernel_device)
        plan = ordered_plan.plan_ordered_decode(contexts, tables, (1, 1, 16), 16, False)
    tiles = [max(1, -(-n // TILE)) for n in lens]
    begins = [0, *itertools.accumulate(tiles)]
    starts = plan.starts.tolist()
    assert starts[0][3] == 0 and starts[-1][3] == begins[-1] and plan.slots <= slots
    used: set[int] = set()
    for (row, begin, length, start, first), (*_, end, _) in itertools.pairwise(starts):
        assert start <= end
        if start == end:
            continue
        assert begin == begins[row] and length == lens[row]
        assert (start - begin) % (CHUNK // TILE) == 0
        if start > begin:
            assert starts[first][3] <= begin < starts[first + 1][3] <= start
            stop = min(end, begins[row + 1])
            own = {at // (CHUNK // TILE) for at in range(start, stop, CHUNK // TILE)}
            assert not own & used and max(own) < plan.slots
            used |= own


DECODES = [
    Shape([130, 0, 64, 700, 63, 257], head_dim=128, block_size=64, dtype=BF16),
    Shape([1100, 5], programs=3, soft_cap=0.5, window=300),
    Shape([300, 0, 66], num_queries=4, used=[4, 0, 3], group=8, window=70, sinks=True),
    Shape([600, 66, 3], num_queries=5, used=[3, 5, 2], block_size=64, group=4, quantized=True),
    Shape([700, 66], num_queries=5, used=[3, 5], head_dim=128, dtype=BF16, block_size=64),
    Shape([520, 67], num_queries=5, dtype=FP16, block_size=64, window=64, quantized=True),
    Shape([600, 0, 130], dtype=BF16, quantized=True, sinks=True, window=100, converted=True),
    Shape([800, 2], group=5, kv_heads=1, head_dim=80, programs=13, copies_tiles=False),
]


@pytest.mark.sampled(share=0.5)
@pytest.mark.parametrize("shape", DECODES, ids=str)
def test_ordered_decode_equals_its_twin(kernel_device: str, shape: Shape) -> None:
    assert_decodes_as_its_twin(shape, kernel_device, Ordered, layers=2)


PREFILLS = [
    Shape([1, 300, 1, 64, 1], [1, 300, 1, 64, 1], group=1),
    Shape([1, 200, 300], [1, 200, 300], head_dim=128, dtype=BF16, soft_cap=2.0),
    Shape([1, 100, 64], [1, 100, 64], group=7, kv_heads=1, window=64, sinks=True),
    Shape([600, 1, 64, 129, 65], [1, 1, 64, 65, 64], group=1, dtype=FP16),
    Shape([500, 129, 70], [1, 129, 70], head_dim=64, dtype=BF16, quantized=True, sinks=True),
    Shape([300, 129], [70, 65], dtype=FP16, quantized=True, window=50, converted=True),
]


@pytest.mark.sampled(share=0.5)
@pytest.mark.parametrize("shape", PREFILLS, ids=str)
def test_ordered_prefill_equals_its_twin(kernel_device: str, shape: Shape) -> None:
    if shape.queries == shape.contexts and not shape.quantized:
        assert_prefills_as_its_twin(shape, False, kernel_device, Ordered)
    assert_prefills_as_its_twin(shape, True, kernel_device, Ordered)


def test_codes_are_read_from_the_cache(kernel_device: str) -> None:
    """Those of a prompt, too, as later steps read them there."""
    paged = Ordered(Shape([5], [5], quantized=True), kernel_device)
    kv, ends = paged.kernel_layer(), (paged.cu_q, paged.cu_k)
    with pytest.raises(AssertionError, match="read from the cache"):
        ordered_prefill(paged, paged.q, paged.k, paged.v, kv, *ends, None)
