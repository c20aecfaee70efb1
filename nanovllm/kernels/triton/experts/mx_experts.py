"""Experts with biases and a clamped gate whose weights are in MXFP4: see `MxStack`.

T tokens, K experts of each, N = T * K pairs of a token and an expert, E experts of this rank. The
first launch computes gate and up, adds their biases and applies the gate; its results are in the
order of experts. The second one adds its bias too, and multiplies by the pairs' shares. The codes
of a tile are converted in registers, once for each tile of pairs, and multiplied by the tensor
cores as the left matrix. In small tiles, registers hold the codes of several runs, whose loads are
in flight together. Nothing syncs, and all shapes depend only on those of the arguments.

Sums: float32, over runs of 128 inputs one after the other. A token's experts are added up in the
order of its choices; with tiles of 128 pairs, each part is rounded to the type of x before that.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.operands.expert_biases import ExpertBiases
from nanovllm.kernels.triton.common import (
    await_inputs,
    can_copy_tiles,
    dot,
    early,
    let_next_begin,
)
from nanovllm.kernels.triton.experts.clamped_gate import Gate, clamped_gate
from nanovllm.kernels.triton.experts.grouping import TiledPairs, tile_pairs
from nanovllm.kernels.triton.experts.many_pairs import tile_of
from nanovllm.kernels.triton.experts.mx_few import few_parts, takes_few
from nanovllm.kernels.triton.experts.mx_stack import RUN, MxStack
from nanovllm.kernels.triton.experts.mx_values import hold_mx_words, load_mx_values, mx_values
from nanovllm.kernels.triton.linear.block_values import lanes

TOGETHER = 8  # tiles of pairs for which neighbouring programs read the same weights
LEAST, MOST = 16, 128  # pairs of a tile
MOST_EARLY_PAIRS = 128  # of layers whose kernels begin early and hold codes: as measured
HELD_RUNS, HELD_RUNS_OF_ONE = 2, 3  # with a gate, which has two matrices, and without


@dataclass(frozen=True, slots=True)
class MxTiles:
    """The tiles of a product, except for their pairs."""

    outputs: int
    stages: int
    warps: int


@triton.jit
def _mx_experts_kernel(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, scales_ptr, bias_ptr, shares_ptr, out_ptr, order_ptr, tiles_ptr,
    num_tiles_ptr, alpha, limit,
    N: tl.constexpr, K: tl.constexpr, RUN: tl.constexpr, IS_WIDE: tl.constexpr,
    PER_ROW: tl.constexpr, GATED: tl.constexpr, ROUNDED: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, HOLD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one tile's pairs; surplus programs do nothing.

    Registers hold the codes of HOLD runs at a time; if HOLD is 0, STAGES runs are read ahead.

    GATED: rows of x are tokens, and results are in the order of experts. Else rows of x are in that
    order, and results in the order of pairs. ROUNDED: gates and ups are rounded to the type of x
    before their biases are added.
    """
    await_inputs(EARLY)
    let_next_begin(EARLY)
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program, num_tiles = tl.program_id(0), tl.load(num_tiles_ptr)
    if program < num_tiles * columns:
        expert, first, end, column = tile_of(program, num_tiles, columns, tiles_ptr, TOGETHER)
        place = first + tl.arange(0, BLOCK_M)
        real = place < end
        place = tl.minimum(place, end - 1).to(tl.int64)
        pair = tl.load(order_ptr + place).to(tl.int64)
        row = pair // PER_ROW if GATED else place
        k = tl.arange(0, RUN)
        x_at = x_ptr + row[:, None] * K + k[None, :]
        first_n = column * BLOCK_N
        n, other_n = lanes(first_n, N, BLOCK_N)
        RUNS: tl.constexpr = (K + RUN - 1) // RUN  # noqa: N806
        OUTPUTS: tl.constexpr = N * (1 + GATED)  # noqa: N806
        matrix = expert.to(tl.int64) * (RUNS * OUTPUTS)
        codes_ptr += matrix * 16
        scales_ptr += matrix
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = acc
        if HOLD:
            for first in tl.range(0, RUNS, HOLD, num_stages=1):
                held = hold_mx_words(
                    codes_ptr, scales_ptr, n, other_n, first, RUNS, OUTPUTS, HOLD
                )  # fmt: skip
                if GATED:
                    ups = hold_mx_words(
                        codes_ptr, scales_ptr, N + n, N + other_n, first, RUNS, OUTPUTS, HOLD
                    )  # fmt: skip
                rows = ()
                for i in tl.static_range(HOLD):
                    first_k = (first + i) * RUN
                    rows += (  # type: ignore[assignment]
                        tl.load(x_at + first_k, mask=(k < K - first_k)[None, :], other=0.0),
                    )
                for i in tl.static_range(HOLD):
                    acc = dot(mx_values(held[i], rows[i], IS_WIDE), tl.trans(rows[i]), acc)
                    if GATED:
                        up = dot(mx_values(ups[i], rows[i], IS_WIDE), tl.trans(rows[i]), up)
        else:
            for run in tl.range(0, RUNS, num_stages=STAGES):
                if K % RUN:
                    x = tl.load(x_at + run * RUN, mask=(k < K - run * RUN)[None, :], other=0.0)
                else:
                    x = tl.load(x_at + run * RUN)
                values = load_mx_values(codes_ptr, scales_ptr, n, other_n, run, x, OUTPUTS, IS_WIDE)
                acc = dot(values, tl.trans(x), acc)
                if GATED:
                    values = load_mx_values(
                        codes_ptr, scales_ptr, N + n, N + other_n, run, x, OUTPUTS, IS_WIDE
                    )
                    up = dot(values, tl.trans(x), up)
        out_n = first_n + tl.arange(0, BLOCK_N)
        inside = out_n < N
        if ROUNDED:
            acc = acc.to(x_ptr.dtype.element_ty).to(tl.float32)
            up = up.to(x_ptr.dtype.element_ty).to(tl.float32)
        if bias_ptr is not None:
            bias_at = bias_ptr + expert.to(tl.int64) * OUTPUTS + out_n
            acc += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)[:, None]
            if GATED:
                up += tl.load(bias_at + N, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc = clamped_gate(acc, up, alpha, limit)
            out_at = out_ptr + place[None, :] * N + out_n[:, None]
        else:
            acc *= tl.load(shares_ptr + pair)[None, :]
            out_at = out_ptr + pair[None, :] * N + out_n[:, None]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=real[None, :] & inside[:, None])


def mx_parts(
    x: torch.Tensor,
    gate_up: MxStack,
    down: MxStack,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
    biases: ExpertBiases,
    rounded: bool = False,
) -> torch.Tensor:
    """The outputs [N, hidden] of all pairs, with their biases, times their shares.

    The outputs of other ranks' experts are not written. Many are rounded to the type of x; few are
    float32. If `rounded`, all are rounded and lack their biases, and gates and ups are rounded
    before they get theirs. Peak memory: N rows of both products. Bytes moved: the codes of each
    expert with pairs, once for each of its tiles, most of which the cache has.
    """
    (num_here, hidden, size), num_pairs = down.shape, expert_ids.numel()
    assert x.is_contiguous() and x.shape[1] == gate_up.shape[2] == hidden
    if takes_few(x, num_pairs) and not rounded:
        return few_parts(x, gate_up, down, expert_ids, shares, biases)
    rows = rows_of_tile(num_pairs, num_experts, x.dtype)
    pairs = tile_pairs(expert_ids, num_here, rows)
    inner = x.new_empty(num_pairs, size)
    gate = Gate(biases.alpha, biases.limit, expert_ids.shape[1])
    multiply(x, gate_up, biases.gate_up, shares, inner, pairs, gate, rounded)
    few = rows < MOST and not rounded
    out = x.new_empty(num_pairs, hidden, dtype=torch.float32 if few else x.dtype)
    multiply(inner, down, None if rounded else biases.down, shares, out, pairs)
    return out


def mx_linear(
    x: torch.Tensor,
    weight: MxStack,
    pairs: TiledPairs,
    shares: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """As `grouped_linear`: a product alone, without a bias. It copies a row of x for each pair."""
    num_pairs, size_out = len(pairs.order), weight.shape[1]
    rows = x[pairs.order.long() // (num_pairs // len(x))]
    if shares is None:
        shares = x.new_ones(num_pairs, dtype=torch.float32)
    out = x.new_empty(num_pairs, size_out, dtype=dtype)
    multiply(rows, weight, None, shares, out, pairs)
    return out


def rows_of_tile(num_pairs: int, num_experts: int, dtype: torch.dtype) -> int:
    """The pairs of a tile, by the mean number of pairs of an expert."""
    mean = max(1, num_pairs // num_experts)
    most = MOST if dtype.itemsize == 2 else LEAST
    return max(LEAST, min(most, next_power_of_2(mean + mean // 2)))


def begins_early(num_pairs: int) -> bool:
    """Whether the kernels of a layer's pairs begin while the kernel before them ends."""
    return num_pairs <= MOST_EARLY_PAIRS


def held_runs(rows: int, num_pairs: int, x: torch.Tensor, gated: bool) -> int:
    """The runs whose codes registers hold, in tiles with this number of pairs; 0: none."""
    small = rows == LEAST and x.dtype.itemsize == 2 and can_copy_tiles(x.device)
    if not small or num_pairs > MOST_EARLY_PAIRS:
        return 0
    return HELD_RUNS if gated else HELD_RUNS_OF_ONE


def tiles_for(rows: int, copies_tiles: bool, dtype: torch.dtype) -> MxTiles:
    """The other sizes of tiles with this number of pairs: on Hopper GPUs, and on others."""
    if dtype.itemsize > 2:
        return MxTiles(16, 2, 4)
    if rows < 64:
        return MxTiles(64, 4 if copies_tiles else 3, 4)
    if rows < MOST or not copies_tiles:
        return MxTiles(64, 3 if copies_tiles else 2, 4 if rows < MOST else 8)
    return MxTiles(128, 3, 8)


def multiply(
    x: torch.Tensor,
    weight: MxStack,
    bias: torch.Tensor | None,
    shares: torch.Tensor,
    out: torch.Tensor,
    pairs: TiledPairs,
    gate: Gate | None = None,
    rounded: bool = False,
) -> None:
    """One product, of tokens with a gate, or of pairs in the order of experts."""
    size_in, size_out, num_pairs = x.shape[1], out.shape[1], len(pairs.order)
    tiles = tiles_for(pairs.rows, can_copy_tiles(x.device), x.dtype)
    alpha, limit, per_row = gate or (0.0, 0.0, 0)
    _mx_experts_kernel[(len(pairs.tiles) * cdiv(size_out, tiles.outputs),)](
        x, weight.codes, weight.scales, bias, shares, out, pairs.order, pairs.tiles,
        pairs.num_tiles, alpha, limit,
        N=size_out, K=size_in, RUN=RUN, IS_WIDE=weight.is_wide, PER_ROW=per_row,
        GATED=gate is not None, ROUNDED=rounded, TOGETHER=TOGETHER, BLOCK_M=pairs.rows,
        BLOCK_N=tiles.outputs,
        STAGES=tiles.stages, HOLD=held_runs(pairs.rows, num_pairs, x, gate is not None),
        num_warps=tiles.warps,
        **(early(x.device) if begins_early(num_pairs) else {"EARLY": False}),
    )  # fmt: skip
