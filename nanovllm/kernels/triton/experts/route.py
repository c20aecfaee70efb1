"""The router of a layer of experts in one kernel: scores, the K best experts, and their shares.

T tokens, K experts of each, N = T * K pairs of a token and an expert, E experts. A program computes
a tile of tokens, or a part of its inputs; the last program of a tile chooses the experts. For few
rows, the last program of all sorts the pairs by expert.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.operands.scaled import Scaled
from nanovllm.kernels.plain import route as plain
from nanovllm.kernels.triton.common import (
    await_inputs,
    dot,
    early,
    leave_parts,
    let_next_begin,
    num_multiprocessors,
    shared_bytes,
    sum_parts,
)
from nanovllm.kernels.triton.experts.grouping import Groups, most_tiles, pairs_of_a_tile

FEW_ROWS, MANY_ROWS = 16, 64  # rows of a tile
MOST_EXPERTS_OF_MANY = 256  # with more experts, registers do not hold the scores of many rows
FEW_FLOAT32 = 512  # the most rows in float32, which tensor cores do not multiply
LEAST_INPUTS, MOST_INPUTS = 16, 128  # inputs at a time
MOST_SPLITS = 8  # the most programs that share a tile
MOST_TILES = 256  # the most tiles that programs share
CHUNK = 1024  # pairs that are sorted at a time


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    scores, E: tl.constexpr, K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    NORMALIZED: tl.constexpr,
):  # fmt: skip
    """The K best experts of each row's scores [T, BLOCK_E]: their ids and shares [T, BLOCK_K]."""
    e = tl.arange(0, BLOCK_E)[None, :]
    k = tl.arange(0, BLOCK_K)[None, :]
    left = tl.where(e < E, scores, -float("inf"))
    top = tl.max(left, axis=1)[:, None]
    total = tl.sum(tl.exp(left - top), axis=1)[:, None]
    ids = tl.zeros([scores.shape[0], BLOCK_K], tl.int32)
    best = tl.full([scores.shape[0], BLOCK_K], -float("inf"), tl.float32)
    for i in range(K):
        score, at = tl.max(left, axis=1, return_indices=True)
        at = tl.minimum(at, E - 1)[:, None]  # any expert for rows that are not finite
        ids = tl.where(k == i, at, ids)
        best = tl.where(k == i, score[:, None], best)
        left = tl.where(e == at, -float("inf"), left)
    shares = tl.exp(best - top)
    if NORMALIZED:
        total = tl.sum(shares, axis=1)[:, None]
    return ids, shares / total


@triton.jit
def _sort(  # type: ignore[no-untyped-def]
    ids_ptr, slots_ptr, counts_ptr, order_ptr, bounds_ptr, tile_ends_ptr, num_pairs,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sort all pairs by expert, from the experts' counts and each pair's number in its expert."""
    e = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + e, mask=e < E, other=0, cache_modifier=".cg")
    ends = tl.cumsum(counts, axis=0)
    tl.store(bounds_ptr + e, ends - counts, mask=e < E)
    tl.store(bounds_ptr + E, num_pairs)
    tile_ends = tl.cumsum((counts + BLOCK_M - 1) // BLOCK_M, axis=0)
    tl.store(tile_ends_ptr + e, tile_ends, mask=e < E)
    tl.debug_barrier()  # all threads have read the counts, and see the bounds
    tl.store(counts_ptr + e, 0, mask=e < E)  # reset for the next call
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        inside = pair < num_pairs
        expert = tl.load(ids_ptr + pair, mask=inside, other=0, cache_modifier=".cg")
        slot = tl.load(slots_ptr + pair, mask=inside, other=0, cache_modifier=".cg")
        first = tl.load(bounds_ptr + expert, mask=inside, other=0)
        tl.store(order_ptr + first + slot, pair, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _route_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, squares_ptr, ids_ptr, shares_ptr, slots_ptr, order_ptr, bounds_ptr,
    tile_ends_ptr, parts_ptr, counters_ptr, num_rows, eps,
    H: tl.constexpr, E: tl.constexpr, K: tl.constexpr, NORMALIZED: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, SPLIT: tl.constexpr, GROUPED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Route one tile of rows. Each expert and each tile has a counter, and all tiles have one."""
    tile = tl.program_id(0)
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    h = tl.arange(0, BLOCK_H)
    real = (t < num_rows)[:, None]
    await_inputs(EARLY)
    PART: tl.constexpr = ((H + SPLIT - 1) // SPLIT + BLOCK_H - 1) // BLOCK_H * BLOCK_H  # noqa: N806
    first_h = tl.program_id(1) * PART
    scores = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    x_at = x_ptr + t.to(tl.int64)[:, None] * H + h[None, :]
    w_at = weight_ptr + e[:, None] * H + h[None, :]
    for start in range(first_h, first_h + PART, BLOCK_H):
        left = (h < H - start)[None, :]
        x = tl.load(x_at + start, mask=real & left, other=0.0)
        w = tl.load(w_at + start, mask=(e < E)[:, None] & left, other=0.0)
        scores += dot(x.to(w.dtype), tl.trans(w))
    at = t[:, None] * BLOCK_E + e[None, :]
    arrivals_ptr = counters_ptr + E
    finishes = leave_parts(scores, scores, parts_ptr, arrivals_ptr, tile, tl.program_id(1),
                           num_rows * BLOCK_E, at, real, SPLIT, False)  # fmt: skip
    if finishes:
        scores, _ = sum_parts(scores, scores, parts_ptr, arrivals_ptr, tile, num_rows * BLOCK_E, at,
                              real, SPLIT, False, True)  # fmt: skip
        if P:
            p = tl.arange(0, BLOCK_P)[None, :]
            squares = tl.load(squares_ptr + t[:, None] * P + p, mask=real & (p < P), other=0.0)
            scores *= tl.rsqrt(tl.sum(squares, axis=1) / H + eps)[:, None]
        if bias_ptr is not None:
            scores += tl.load(bias_ptr + e, mask=e < E, other=0.0)[None, :]
        ids, shares = _choose(scores, E, K, BLOCK_E, BLOCK_K, NORMALIZED)
        k = tl.arange(0, BLOCK_K)[None, :]
        inside = real & (k < K)
        pair = t.to(tl.int64)[:, None] * K + k
        tl.store(ids_ptr + pair, ids, mask=inside)
        tl.store(shares_ptr + pair, shares, mask=inside)
        if GROUPED:
            slots = tl.atomic_add(counters_ptr + ids, 1, mask=inside)
            tl.store(slots_ptr + pair, slots, mask=inside)
            tl.debug_barrier()
            done_ptr = arrivals_ptr + tl.num_programs(0)
            if tl.atomic_add(done_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
                tl.store(done_ptr, 0)
                _sort(ids_ptr, slots_ptr, counters_ptr, order_ptr, bounds_ptr, tile_ends_ptr,
                      num_rows * K, E, BLOCK_E, BLOCK_M, CHUNK)  # fmt: skip
    let_next_begin(EARLY)


@dataclass(frozen=True)
class Routed:
    """The experts of a step's tokens, and its pairs sorted by expert."""

    shares: torch.Tensor  # [T, K], float32
    ids: torch.Tensor  # [T, K], int32
    groups: Groups


@dataclass(frozen=True)
class Router:
    """The kernel for one layer: its weight [E, hidden], and counters that are zero between calls.

    If `dtype` represents the weight exactly, it is multiplied in that type; sums are float32. The
    bias [E] is float32.
    """

    weight: torch.Tensor
    counters: torch.Tensor
    bias: torch.Tensor | None = None

    @classmethod
    def of(
        cls, weight: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> "Router":
        """Make the kernel for rows of type `dtype`."""
        short = weight.to(dtype)
        counters = weight.new_zeros(len(weight) + MOST_TILES + 1, dtype=torch.int32)
        exact = torch.equal(short.to(weight.dtype), weight)
        return cls(short if exact else weight, counters, bias)

    def route(
        self, x: torch.Tensor, per_token: int, normalized: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts for rows x [T, hidden]. cuBLAS multiplies many rows in float32."""
        if len(x) > FEW_FLOAT32 and self.weight.dtype == torch.float32:
            return plain.route(x, self.weight, per_token, normalized, self.bias)
        ids = torch.empty(len(x), per_token, dtype=torch.long, device=x.device)
        return self._launch(x, None, ids, normalized, None), ids

    def route_few(self, x: Scaled, per_token: int, normalized: bool) -> Routed:
        """Route few rows that lack their norm's factor, and sort their pairs."""
        num_rows, (num_experts, _) = len(x.product), self.weight.shape
        num_pairs = num_rows * per_token
        block_m = pairs_of_a_tile(num_pairs, num_experts)

        def ints(*shape: int) -> torch.Tensor:
            return self.counters.new_empty(*shape)

        ids, groups = ints(num_rows, per_token), Groups(
            ints(num_pairs), ints(num_experts + 1), ints(num_experts),
            most_tiles(num_pairs, num_experts, block_m), block_m,
        )  # fmt: skip
        return Routed(self._launch(x.product, x, ids, normalized, groups), ids, groups)

    def _launch(
        self,
        x: torch.Tensor,
        scaled: Scaled | None,
        ids: torch.Tensor,
        normalized: bool,
        groups: Groups | None,
    ) -> torch.Tensor:
        """Write the ids and the groups; return the shares."""
        (num_rows, hidden), (num_experts, size_in) = x.shape, self.weight.shape
        assert x.is_contiguous() and hidden == size_in
        processors = num_multiprocessors(x.device)
        many = num_rows > FEW_ROWS * processors and num_experts <= MOST_EXPERTS_OF_MANY
        rows = MANY_ROWS if many else FEW_ROWS
        tiles = cdiv(num_rows, rows)
        block_e = max(16, next_power_of_2(num_experts))
        tile_bytes = (rows + block_e) * self.weight.itemsize
        block_h, stages = _inputs(tile_bytes, shared_bytes(x.device), rows)
        assert groups is None or tiles <= MOST_TILES
        splits = 1 if tiles > MOST_TILES else _splits(tiles, hidden // block_h, processors)
        shares = torch.empty(ids.shape, dtype=torch.float32, device=x.device)
        parts = shares.new_empty(splits, num_rows, block_e) if splits > 1 else shares
        slots = ids if groups is None else torch.empty_like(ids)
        order, bounds, tile_ends = (ids, ids, ids) if groups is None else groups[:3]
        width, eps = (0, 0.0) if scaled is None else (scaled.squares.shape[1], scaled.eps)
        _route_kernel[(tiles, splits)](
            x, self.weight, self.bias, shares if scaled is None else scaled.squares, ids, shares,
            slots, order, bounds, tile_ends, parts, self.counters, num_rows, eps,
            H=hidden, E=num_experts, K=ids.shape[1], NORMALIZED=normalized,
            P=width, BLOCK_P=next_power_of_2(max(1, width)), SPLIT=splits,
            GROUPED=groups is not None, BLOCK_T=rows, BLOCK_E=block_e,
            BLOCK_K=next_power_of_2(ids.shape[1]), BLOCK_H=block_h,
            BLOCK_M=1 if groups is None else groups.block_m, CHUNK=CHUNK,
            num_warps=4, num_stages=stages, **early(x.device),
        )  # fmt: skip
        return shares


router_for = Router.of


def _inputs(bytes_of_one: int, room: int, rows: int) -> tuple[int, int]:
    """The inputs at a time, so that shared memory has room for at least two tiles, and the stages.

    Shared memory has room for the tiles of all stages; for few rows, of all stages except one.
    """
    inputs = MOST_INPUTS
    while inputs > LEAST_INPUTS and 2 * inputs * bytes_of_one > room:
        inputs //= 2
    tiles = room // (inputs * bytes_of_one)
    return inputs, max(2, min(4, tiles + (rows < MANY_ROWS)))


def _splits(tiles: int, steps: int, processors: int) -> int:
    """The programs that share a tile: all must run at once, and each must have some inputs."""
    splits = 1
    while splits < MOST_SPLITS and 2 * splits * tiles <= processors:
        if steps < 4 * splits:
            break
        splits *= 2
    return splits
