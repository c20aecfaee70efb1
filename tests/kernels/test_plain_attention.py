"""Plain paged attention against a twin that attends to one key after the other, in float64.

Free blocks, and the slots after a sequence's last token, hold huge numbers, so every read of them
is found.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from selection import examples

from nanovllm.kernels.kv_layer import CODES, SCALES, KVLayer
from nanovllm.kernels.plain import masked_attention, scores
from nanovllm.kernels.plain.decode_attention import (
    GROUP_RATIO,
    SMALLEST_GROUP,
    decode_attention,
    gather_blocks,
    group_by_length,
    plan_decode,
)
from nanovllm.kernels.plain.prefill_attention import plan_prefill, prefill_attention
from nanovllm.kernels.plain.store_kvcache import store_kvcache

pytestmark = pytest.mark.usefixtures("one_thread")

HUGE = 1e30
GONE = 2**31 - 1  # no block has this number: to read it is an error
TOLERANCE = dict(rtol=1e-4, atol=2e-5)
SETTINGS = settings(max_examples=examples(80), deadline=None)


@dataclass(frozen=True)
class Shape:
    """A ragged batch: (cached, new) tokens of each sequence."""

    lens: list[tuple[int, int]]
    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    seed: int
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


def shapes(lens: st.SearchStrategy[list[tuple[int, int]]]) -> st.SearchStrategy[Shape]:
    return st.builds(
        Shape,
        lens=lens,
        num_kv_heads=st.sampled_from([1, 2, 3]),
        group=st.sampled_from([1, 2, 7, 8]),
        head_dim=st.sampled_from([8, 16, 40, 64, 128]),
        block_size=st.sampled_from([1, 4, 16]),
        seed=st.integers(0, 2**31),
        window=st.one_of(st.none(), st.integers(1, 120)),
        soft_cap=st.sampled_from([None, 0.5, 3.0]),
        sinks=st.booleans(),
    )


def ragged(
    cached: st.SearchStrategy[int], new: st.SearchStrategy[int]
) -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.lists(st.tuples(cached, new), min_size=1, max_size=6)


NOTHING = st.just(0)
PREFIX = st.one_of(st.integers(0, 20), st.integers(0, 150))
CHUNK = st.one_of(st.integers(1, 5), st.integers(1, 90))
CONTEXT = st.one_of(st.integers(0, 5), st.integers(0, 200))


class Paged:
    """Random tensors of a shape, in a cache with blocks in random order."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        torch.manual_seed(shape.seed)
        size, kv = shape.block_size, (shape.num_kv_heads, shape.head_dim)
        self.totals = [cached + new for cached, new in shape.lens]
        counts = [-(-total // size) for total in self.totals]
        order = torch.randperm(sum(counts) + 3).tolist()
        self.k_cache = torch.full((len(order), size, *kv), HUGE)
        self.v_cache = torch.full((len(order), size, *kv), -HUGE)
        # Rows are filled up with blocks of other sequences, or free ones.
        self.block_tables = torch.full((len(counts), max(*counts, 1)), order[-1], dtype=torch.int32)
        self.keys, self.values = [], []
        for row, (total, count) in enumerate(zip(self.totals, counts, strict=True)):
            cached = shape.lens[row][0]
            table = torch.tensor([order.pop(0) for _ in range(count)], dtype=torch.int32)
            self.block_tables[row, :count] = table
            self.keys.append(torch.randn(total, *kv))
            self.values.append(torch.randn(total, *kv))
            for position in range(total):
                at = int(table[position // size]), position % size
                self.k_cache[at] = self.keys[-1][position]
                self.v_cache[at] = self.values[-1][position]
            if shape.window:  # a block that no query sees has been freed
                passed = max(0, cached + 1 - shape.window) // size
                self.block_tables[row, :passed] = GONE
        num_queries = sum(new for _, new in shape.lens)
        self.q = torch.randn(num_queries, shape.num_heads, shape.head_dim)
        self.sinks = 2 * torch.randn(shape.num_heads) if shape.sinks else None

    def twin(self) -> torch.Tensor:
        """One query, one head at a time, to the keys at and before its position."""
        shape = self.shape
        rows = []
        queries = iter(self.q.double())
        for (cached, new), keys, values in zip(shape.lens, self.keys, self.values, strict=True):
            for position in range(cached, cached + new):
                query = next(queries)
                first = max(0, position + 1 - shape.window) if shape.window else 0
                seen_k = keys[first : position + 1].double()
                seen_v = values[first : position + 1].double()
                heads = []
                for head in range(shape.num_heads):
                    kv_head = head // shape.group
                    scores = seen_k[:, kv_head] @ query[head] / math.sqrt(shape.head_dim)
                    if shape.soft_cap:
                        scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
                    weights = scores.exp()
                    total = weights.sum()
                    if self.sinks is not None:
                        total += self.sinks[head].double().exp()
                    heads.append((weights / total) @ seen_v[:, kv_head])
                rows.append(torch.stack(heads))
        return torch.stack(rows).float()

    def prefill(self, use_cache: bool) -> torch.Tensor:
        """As the runner calls it: with the step's own keys, or with everything in the cache."""
        news = torch.tensor([0] + [new for _, new in self.shape.lens])
        totals = torch.tensor([0, *self.totals])
        pairs = list(zip(self.shape.lens, self.keys, self.values, strict=True))
        k = torch.cat([keys[cached:] for (cached, _), keys, _ in pairs])
        v = torch.cat([values[cached:] for (cached, _), _, values in pairs])
        plan = plan_prefill(
            news.cumsum(0).int(), totals.cumsum(0).int(),
            self.block_tables if use_cache else None, self.shape.block_size,
        )  # fmt: skip
        kv = self.layer(torch.empty(0), torch.empty(0))
        if use_cache:
            kv = self.layer(self.k_cache, self.v_cache)
            k, v = torch.full_like(k, HUGE), torch.full_like(v, HUGE)  # the cache has them all
        return prefill_attention(self.q, k, v, kv, plan)

    def decode(self) -> torch.Tensor:
        context_lens = torch.tensor(self.totals, dtype=torch.int32)
        plan = plan_decode(context_lens, self.block_tables, self.shape.block_size)
        return decode_attention(self.q, self.layer(self.k_cache, self.v_cache), plan)

    def layer(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> KVLayer:
        shape = self.shape
        return KVLayer(
            k_cache, v_cache, shape.scale, shape.window, soft_cap=shape.soft_cap, sinks=self.sinks
        )


# Prefill


@SETTINGS
@given(shapes(ragged(NOTHING, CHUNK)))
@example(Shape([(0, 1)], 1, 1, 8, 1, 0))
@example(Shape([(0, 200), (0, 1), (0, 65), (0, 64)], 2, 7, 16, 16, 0))
@example(Shape([(0, 90), (0, 70)], 2, 7, 16, 16, 0, window=1))
@example(Shape([(0, 90), (0, 70)], 2, 7, 16, 16, 0, window=89))
def test_fresh_prefill_attends_to_its_own_past(shape: Shape) -> None:
    paged = Paged(shape)
    torch.testing.assert_close(paged.prefill(use_cache=False), paged.twin(), **TOLERANCE)


@SETTINGS
@given(shapes(ragged(PREFIX, CHUNK)))
@example(Shape([(0, 1), (1, 1)], 1, 1, 8, 1, 0))
@example(Shape([(96, 1), (0, 200), (15, 16), (16, 17), (150, 3)], 1, 8, 64, 16, 0))
@example(Shape([(96, 1), (0, 200), (15, 16), (16, 17), (150, 3)], 1, 8, 64, 16, 0, window=16))
def test_chunks_and_prefixes_attend_to_every_key(shape: Shape) -> None:
    """Fresh, chunked and cached sequences in one batch: all of them read the cache."""
    paged = Paged(shape)
    torch.testing.assert_close(paged.prefill(use_cache=True), paged.twin(), **TOLERANCE)


@pytest.mark.parametrize("max_elements", [1, 50, 333, 5000])
def test_slices_of_the_mask_fit_together(
    max_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    attend: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention

    def counting(*args: object, **kwargs: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        mask = kwargs["attn_mask"]
        assert isinstance(mask, torch.Tensor)
        assert mask.numel() <= max_elements or mask.shape[2] == 1, "a mask is over the bound"
        return attend(*args, **kwargs)

    monkeypatch.setattr(masked_attention.F, "scaled_dot_product_attention", counting)
    monkeypatch.setattr(masked_attention, "MAX_MASK_ELEMENTS", max_elements)
    paged = Paged(Shape([(96, 50), (0, 23), (7, 60), (130, 1)], 2, 2, 16, 4, seed=5))
    torch.testing.assert_close(paged.prefill(use_cache=True), paged.twin(), **TOLERANCE)
    assert calls >= (100 if max_elements < 100 else 5), "the mask was not sliced"


def test_capped_scores_are_computed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as large as a mask for each head."""
    sizes = []
    attend = scores.attend_by_scores

    def counting(queries: torch.Tensor, keys: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(queries.shape[:3].numel() * keys.shape[2])
        return attend(queries, keys, *rest)

    monkeypatch.setattr(scores, "attend_by_scores", counting)
    monkeypatch.setattr(masked_attention, "MAX_MASK_ELEMENTS", 5000)
    paged = Paged(Shape([(96, 50), (0, 23), (7, 60)], 2, 2, 16, 4, seed=5, soft_cap=2.0))
    torch.testing.assert_close(paged.prefill(use_cache=True), paged.twin(), **TOLERANCE)
    assert max(sizes) <= 5000 and len(sizes) > 5


# Decode


@SETTINGS
@given(shapes(st.lists(st.tuples(CONTEXT, st.just(1)), min_size=1, max_size=9)))
@example(Shape([(0, 1)], 1, 1, 8, 1, 0))
@example(Shape([(199, 1), (0, 1), (63, 1), (64, 1), (65, 1)], 2, 7, 128, 16, 0))
@example(Shape([(199, 1), (0, 1), (63, 1), (64, 1), (65, 1)], 2, 7, 128, 16, 0, window=64))
@example(Shape([(199, 1), (0, 1), (3, 1)], 2, 7, 128, 16, 0, window=1))
def test_decode_attends_to_every_key(shape: Shape) -> None:
    paged = Paged(shape)
    torch.testing.assert_close(paged.decode(), paged.twin(), **TOLERANCE)


@SETTINGS
@given(shapes(st.lists(st.tuples(CONTEXT, st.just(1)), min_size=1, max_size=9)), st.data())
def test_padding_rows_of_a_decode_are_zero_and_change_no_other(
    shape: Shape, data: st.DataObject
) -> None:
    """Padding has length 0, and an earlier batch's entries in table and query."""
    paged = Paged(shape)
    expected = paged.twin()
    is_padding = torch.tensor([data.draw(st.booleans()) for _ in shape.lens])
    paged.totals = [0 if pad else n for pad, n in zip(is_padding, paged.totals, strict=True)]
    paged.q[is_padding] = HUGE
    expected[is_padding] = 0.0
    out = paged.decode()
    torch.testing.assert_close(out, expected, **TOLERANCE)
    assert not out[is_padding].any()


@SETTINGS
@given(shapes(st.lists(st.tuples(CONTEXT, st.integers(1, 4)), min_size=1, max_size=9)))
@example(Shape([(0, 4), (199, 1), (62, 3), (15, 4)], 2, 2, 16, 16, 0))
@example(Shape([(0, 4), (199, 1), (62, 3), (15, 4)], 2, 2, 16, 16, 0, window=3))
def test_several_queries_of_a_sequence_attend_to_every_key_before_them(shape: Shape) -> None:
    """A sequence has four rows, of which the last ones may be unused, and one row of the table."""
    paged = Paged(shape)
    used = torch.tensor([[j < new for j in range(4)] for _, new in shape.lens]).flatten()
    lens = [cached + 1 + j for cached, _ in shape.lens for j in range(4)]
    q = torch.full((len(used), *paged.q.shape[1:]), HUGE)
    q[used] = paged.q
    context_lens = torch.tensor(lens, dtype=torch.int32) * used
    plan = plan_decode(context_lens, paged.block_tables, shape.block_size, num_queries=4)
    out = decode_attention(q, paged.layer(paged.k_cache, paged.v_cache), plan)
    torch.testing.assert_close(out[used], paged.twin(), **TOLERANCE)
    assert not out[~used].any()


def test_a_decode_of_padding_alone_is_zero() -> None:
    paged = Paged(Shape([(3, 1), (9, 1)], 2, 2, 16, 4, seed=0))
    paged.totals = [0, 0]
    assert not paged.decode().any()


def test_a_wider_table_does_not_change_a_decode() -> None:
    """Graphs replay with tables as wide as the longest possible context."""
    paged = Paged(Shape([(3, 1), (70, 1), (20, 1)], 2, 2, 16, 4, seed=1))
    expected = paged.decode()
    stale = torch.randint(0, len(paged.k_cache), (3, 100), dtype=torch.int32)
    stale[:, : paged.block_tables.shape[1]] = paged.block_tables
    paged.block_tables = stale
    assert torch.equal(paged.decode(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_attention_is_near_float32(dtype: torch.dtype) -> None:
    """The softmax runs in float32; inputs, weights and the result are rounded to the type."""
    paged = Paged(Shape([(96, 1), (5, 1), (0, 1)], 2, 4, 64, 16, seed=2))
    for name in ("q", "k_cache", "v_cache"):
        tensor = getattr(paged, name)
        limit = torch.finfo(dtype).max / 100
        setattr(paged, name, tensor.clamp(-limit, limit).to(dtype))
    paged.q, q16 = paged.q.float(), paged.q
    paged.keys = [k.to(dtype).float() for k in paged.keys]
    paged.values = [v.to(dtype).float() for v in paged.values]
    expected = paged.twin()
    paged.q = q16
    bound = 4 * torch.finfo(dtype).eps
    for out in (paged.decode(), paged.prefill(use_cache=True)):
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected, rtol=bound, atol=bound)


# Groups and blocks


@SETTINGS
@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), max_size=40))
def test_groups_have_every_sequence_and_little_padding(lengths: list[tuple[int, int]]) -> None:
    groups = group_by_length(list(lengths))
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        for dim in range(2):
            sizes = [max(lengths[index][dim], SMALLEST_GROUP) for index in group]
            assert max(sizes) <= GROUP_RATIO * min(sizes) + 1


def test_gathered_blocks_are_in_order() -> None:
    cache = torch.arange(5 * 2 * 3 * 4.0).view(5, 2, 3, 4)
    tables = torch.tensor([[4, 0], [2, 2]])
    for rows, x in zip(
        gather_blocks(KVLayer(cache, -cache, 1.0), tables, cache.dtype),
        (cache, -cache),
        strict=True,
    ):
        assert rows.shape == (2, 3, 4, 4)  # [B, KVH, K, D]
        assert torch.equal(rows[0, 1], torch.cat([x[4, :, 1], x[0, :, 1]]))
        assert torch.equal(rows[1, 2], torch.cat([x[2, :, 2], x[2, :, 2]]))


def test_gathered_codes_have_their_scales() -> None:
    codes = torch.arange(5 * 2 * 3 * 4.0).view(5, 2, 3, 4).remainder(16).to(CODES)
    scales = (2.0 ** torch.arange(5 * 3 * 2).remainder(7)).view(5, 3, 2).to(SCALES)
    kv = KVLayer(codes, codes, 1.0, None, scales, scales + 1)
    for rows, factors in zip(
        gather_blocks(kv, torch.tensor([[4, 0]]), torch.float32), (scales, scales + 1), strict=True
    ):
        for position, (block, at) in enumerate([(4, 0), (4, 1), (0, 0), (0, 1)]):
            expected = codes[block, at].float() * factors[block, :, at, None].float()
            assert torch.equal(rows[0, :, position], expected)


# Storing


def test_tokens_are_stored_in_their_slots() -> None:
    key, value = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    k_cache, v_cache = torch.zeros(4, 2, 2, 4), torch.zeros(4, 2, 2, 4)
    store_kvcache(key, value, KVLayer(k_cache, v_cache, 1.0), torch.tensor([7, 0, 3]))
    for token, (block, at) in enumerate([(3, 1), (0, 0), (1, 1)]):
        assert torch.equal(k_cache[block, at], key[token])
        assert torch.equal(v_cache[block, at], value[token])
    for cache in (k_cache, v_cache):
        assert int((cache != 0).any(-1).any(-1).sum()) == 3, "other slots were written"


def test_slot_minus_one_writes_nothing() -> None:
    """In PyTorch, a negative index counts from the end."""
    key = torch.ones(3, 2, 4)
    k_cache, v_cache = torch.zeros(4, 2, 2, 4), torch.zeros(4, 2, 2, 4)
    store_kvcache(key, key, KVLayer(k_cache, v_cache, 1.0), torch.tensor([-1, 5, -1]))
    for cache in (k_cache, v_cache):
        assert cache.flatten(0, 1)[5].all() and cache.sum() == 8
    store_kvcache(key, key, KVLayer(k_cache, v_cache, 1.0), torch.tensor([-1, -1, -1]))
    kv = KVLayer(k_cache, v_cache, 1.0)
    store_kvcache(key[:0], key[:0], kv, torch.tensor([], dtype=torch.long))
    assert k_cache.sum() == v_cache.sum() == 8
