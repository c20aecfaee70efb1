"""The router of a layer of experts in one kernel: scores, the K best experts, and their shares.

T tokens, K experts of each, N = T * K pairs of a token and an expert, E experts. A program computes
a tile of tokens, or a part of its inputs; the last program of a tile chooses the experts. For few
rows, the last program of all sorts the pairs by expert.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.operands.routing import Routing
from nanovllm.kernels.operands.scaled import Scaled
from nanovllm.kernels.plain.choose_experts import choose_experts
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
from nanovllm.kernels.triton.experts.sort_pairs import sort_pairs, sort_pairs_of_one
from nanovllm.kernels.triton.linear.sigmoid_and_mul import sigmoid

FEW_ROWS, MANY_ROWS = 16, 64  # rows of a tile
# With more experts, registers do not hold the scores of many rows; or scores and what they become.
MOST_EXPERTS_OF_MANY, MOST_OF_SIGMOIDS = 256, 128
FEW_FLOAT32 = 512  # the most rows in float32, which tensor cores do not multiply
LEAST_INPUTS, MOST_INPUTS = 16, 128  # inputs at a time
# Of one row: the inputs times experts at a time, which registers hold, the warps, and the splits.
MOST_PRODUCTS, WARPS_OF_ONE, SPLITS_OF_ONE = 16384, 4, 16
MOST_SPLITS = 8  # the most programs that share a tile
MOST_TILES = 256  # the most tiles that programs share
CHUNK = 1024  # pairs that are sorted at a time


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    scores, correction_ptr, tiny, scale, E: tl.constexpr, K: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, NORMALIZED: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """The K best experts of each row's scores [T, BLOCK_E]: their ids and shares [T, BLOCK_K].

    Of equal ones, the first experts are chosen.
    """
    e = tl.arange(0, BLOCK_E)[None, :]
    k = tl.arange(0, BLOCK_K)[None, :]
    PLAIN: tl.constexpr = correction_ptr is None and not SIGMOID  # noqa: N806
    left = tl.where(e < E, scores, -float("inf"))
    top = tl.max(left, axis=1)[:, None]
    total = tl.sum(tl.exp(left - top), axis=1)[:, None]
    if not PLAIN:
        every = sigmoid(left) if SIGMOID else tl.exp(left - top) / total
        left = every
        if correction_ptr is not None:
            left += tl.load(correction_ptr + e, mask=e < E, other=0.0)
        left = tl.where(e < E, left, -float("inf"))
    ids = tl.zeros([scores.shape[0], BLOCK_K], tl.int32)
    best = tl.full([scores.shape[0], BLOCK_K], -float("inf") if PLAIN else 0.0, tl.float32)
    for i in range(K):
        score, at = tl.max(left, axis=1, return_indices=True)
        at = tl.minimum(at, E - 1)[:, None]  # any expert for rows that are not finite
        ids = tl.where(k == i, at, ids)
        if PLAIN:
            best = tl.where(k == i, score[:, None], best)
        else:
            best = tl.where(k == i, tl.sum(tl.where(e == at, every, 0.0), axis=1)[:, None], best)
        left = tl.where(e == at, -float("inf"), left)
    if PLAIN:
        best = tl.exp(best - top)
        if not NORMALIZED:
            best = best / total
    if NORMALIZED:
        best = best / (tl.sum(best, axis=1)[:, None] + tiny)
    return ids, best * scale


@triton.jit(do_not_specialize=["num_rows"])
def _route_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, correction_ptr, added_ptr, squares_ptr, ids_ptr, shares_ptr,
    slots_ptr, order_ptr, bounds_ptr, tile_ends_ptr, parts_ptr, counters_ptr, num_rows, eps, tiny,
    scale,
    H: tl.constexpr, E: tl.constexpr, K: tl.constexpr, NORMALIZED: tl.constexpr,
    SIGMOID: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, SPLIT: tl.constexpr,
    GROUPED: tl.constexpr,
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
    if BLOCK_T == 1:  # without tensor cores, and with all loads at once
        products = tl.zeros([BLOCK_E, BLOCK_H], tl.float32)
        for start in tl.static_range(0, PART, BLOCK_H):
            left = (h < H - first_h - start)[None, :]
            x = tl.load(x_at + first_h + start, mask=left, other=0.0)
            w = tl.load(w_at + first_h + start, mask=(e < E)[:, None] & left, other=0.0)
            products += x.to(tl.float32) * w.to(tl.float32)
        scores = tl.sum(products, axis=1)[None, :]
    else:
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
        if added_ptr is not None:
            there = real & (e < E)[None, :]
            scores += tl.load(added_ptr + t[:, None] * E + e[None, :], mask=there, other=0.0)
        ids, shares = _choose(scores, correction_ptr, tiny, scale, E, K, BLOCK_E, BLOCK_K,
                              NORMALIZED, SIGMOID)  # fmt: skip
        k = tl.arange(0, BLOCK_K)[None, :]
        inside = real & (k < K)
        pair = t.to(tl.int64)[:, None] * K + k
        tl.store(ids_ptr + pair, ids, mask=inside)
        tl.store(shares_ptr + pair, shares, mask=inside)
        if GROUPED:
            if BLOCK_T == 1:
                sort_pairs_of_one(tl.max(ids, axis=0), order_ptr, bounds_ptr, tile_ends_ptr, E, K,
                                  BLOCK_E, BLOCK_K, BLOCK_M)  # fmt: skip
            else:
                slots = tl.atomic_add(counters_ptr + ids, 1, mask=inside)
                tl.store(slots_ptr + pair, slots, mask=inside)
                tl.debug_barrier()
                done_ptr = arrivals_ptr + tl.num_programs(0)
                if tl.atomic_add(done_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
                    tl.store(done_ptr, 0)
                    sort_pairs(ids_ptr, slots_ptr, counters_ptr, order_ptr, bounds_ptr,
                               tile_ends_ptr, num_rows * K, E, BLOCK_E, BLOCK_M, CHUNK)  # fmt: skip
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

    If the type of the rows represents the weight exactly, it is multiplied in that type; sums are
    float32. The bias [E] is added to the scores, and the correction [E] for the choice alone; both
    are float32. `routing` must be one that `is_fused`.
    """

    weight: torch.Tensor
    counters: torch.Tensor
    routing: Routing
    bias: torch.Tensor | None = None
    correction: torch.Tensor | None = None
    one_order: bool = False  # whether the order of sums may not depend on the number of rows

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        dtype: torch.dtype,
        routing: Routing,
        bias: torch.Tensor | None = None,
        correction: torch.Tensor | None = None,
    ) -> "Router":
        """Make the kernel for rows of type `dtype`."""
        short = weight.to(dtype)
        counters = weight.new_zeros(len(weight) + MOST_TILES + 1, dtype=torch.int32)
        exact = torch.equal(short.to(weight.dtype), weight)
        return cls(short if exact else weight, counters, routing, bias, correction)

    def route(
        self, x: torch.Tensor, added: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts for rows x [T, hidden]. `added` [T, E] to their scores needs one order."""
        assert added is None or (self.one_order and added.is_contiguous())
        if len(x) > FEW_FLOAT32 and self.weight.dtype == torch.float32 and not self.one_order:
            outputs = F.linear(x.float(), self.weight, self.bias)  # by cuBLAS
            return choose_experts(outputs, self.routing, self.correction)
        ids = torch.empty(len(x), self.routing.per_token, dtype=torch.long, device=x.device)
        return self._launch(x, None, ids, None, added), ids

    def route_few(self, x: Scaled) -> Routed:
        """Route few rows that lack their norm's factor, and sort their pairs."""
        num_rows, (num_experts, _) = len(x.product), self.weight.shape
        per_token = self.routing.per_token
        num_pairs = num_rows * per_token
        block_m = pairs_of_a_tile(num_pairs, num_experts)

        def ints(*shape: int) -> torch.Tensor:
            return self.counters.new_empty(*shape)

        ids, groups = ints(num_rows, per_token), Groups(
            ints(num_pairs), ints(num_experts + 1), ints(num_experts),
            most_tiles(num_pairs, num_experts, block_m), block_m,
        )  # fmt: skip
        return Routed(self._launch(x.product, x, ids, groups), ids, groups)

    def _launch(
        self,
        x: torch.Tensor,
        scaled: Scaled | None,
        ids: torch.Tensor,
        groups: Groups | None,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the ids and the groups; return the shares."""
        (num_rows, hidden), (num_experts, size_in) = x.shape, self.weight.shape
        routing = self.routing
        assert x.is_contiguous() and hidden == size_in
        processors = num_multiprocessors(x.device)
        is_plain = routing.scores != "sigmoid" and self.correction is None
        most_experts = MOST_EXPERTS_OF_MANY if is_plain else MOST_OF_SIGMOIDS
        many = num_rows > FEW_ROWS * processors and num_experts <= most_experts
        rows = MANY_ROWS if many else 1 if num_rows == 1 else FEW_ROWS
        rows = FEW_ROWS if self.one_order else rows
        tiles = cdiv(num_rows, rows)
        block_e = max(16, next_power_of_2(num_experts))
        tile_bytes = (rows + block_e) * self.weight.itemsize
        block_h, stages = _inputs(tile_bytes, shared_bytes(x.device), rows)
        if rows == 1:
            block_h = max(LEAST_INPUTS, min(MOST_INPUTS, MOST_PRODUCTS // block_e))
        assert groups is None or tiles <= MOST_TILES
        alone = tiles > MOST_TILES or self.one_order
        splits = 1 if alone else _splits(tiles, hidden // block_h, processors)
        if rows == 1:
            splits = min(SPLITS_OF_ONE, next_power_of_2(cdiv(hidden, 2 * block_h)))
        shares = torch.empty(ids.shape, dtype=torch.float32, device=x.device)
        parts = shares.new_empty(splits, num_rows, block_e) if splits > 1 else shares
        slots = ids if groups is None else torch.empty_like(ids)
        order, bounds, tile_ends = (ids, ids, ids) if groups is None else groups[:3]
        width, eps = (0, 0.0) if scaled is None else (scaled.squares.shape[1], scaled.eps)
        _route_kernel[(tiles, splits)](
            x, self.weight, self.bias, self.correction, added,
            shares if scaled is None else scaled.squares, ids, shares,
            slots, order, bounds, tile_ends, parts, self.counters, num_rows, eps,
            routing.tiny, routing.scale, H=hidden, E=num_experts, K=ids.shape[1],
            NORMALIZED=routing.sums_to_one, SIGMOID=routing.scores == "sigmoid", P=width,
            BLOCK_P=next_power_of_2(max(1, width)), SPLIT=splits,
            GROUPED=groups is not None, BLOCK_T=rows, BLOCK_E=block_e,
            BLOCK_K=next_power_of_2(ids.shape[1]), BLOCK_H=block_h,
            BLOCK_M=1 if groups is None else groups.block_m, CHUNK=CHUNK,
            num_warps=WARPS_OF_ONE if rows == 1 else 4, num_stages=stages, **early(x.device),
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
