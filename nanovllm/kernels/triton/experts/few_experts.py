"""Layers of experts for few rows, in four kernels (five for quantized weights), with norm and sum.

T tokens, K experts of each, N = T * K pairs of a token and an expert, E experts. The router's
kernel sorts the pairs by expert. This file has the experts' two grouped products and the sum of
each token's experts. The first product also applies the norm's factor and the activation. The sum
adds the residual and prepares the rows for the next norm.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.operands.scaled import ExpertWeights, Scaled
from nanovllm.kernels.triton.common import (
    await_inputs,
    can_copy_tiles,
    dot,
    early,
    let_next_begin,
    rows_with_room,
    tiles_of,
)
from nanovllm.kernels.triton.experts.experts import Stack, grouped_linear
from nanovllm.kernels.triton.experts.grouping import LEAST, Groups, find_tile
from nanovllm.kernels.triton.linear.arranged import ArrangedMatrix
from nanovllm.kernels.triton.linear.silu_and_mul import gated

BLOCK_N, BLOCK_SUM = 64, 512
# For the smallest tiles, and for larger ones; a multiprocessor runs two programs.
BLOCK_K, STAGES = (128, 64), (3, 4)


@triton.jit
def _expert_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, weight_tiles, squares_ptr, shares_ptr, out_ptr, order_ptr, bounds_ptr,
    tile_ends_ptr, eps,
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr,
    PER_ROW: tl.constexpr, GATED: tl.constexpr, COPIED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of a tile of pairs: GATED, `silu(gate) * up`; else times the pairs' shares.

    PER_ROW pairs share a row of x. The rows' factor is computed from P parts of their sums of
    squares.
    """
    await_inputs(EARLY)
    expert, place, real = find_tile(
        tl.program_id(0), bounds_ptr, tile_ends_ptr, E, BLOCK_M, BLOCK_E
    )
    if expert < E:
        pair = tl.load(order_ptr + place, mask=real, other=0)
        row = pair // PER_ROW
        first_n = tl.program_id(1) * BLOCK_N
        n = first_n + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        first_row = expert * (N * (1 + GATED)) + first_n
        x_at = x_ptr + row[:, None] * K + k[None, :]
        w_row = (first_row + tl.arange(0, BLOCK_N)).to(tl.int64)
        w_at = weight_ptr + w_row[:, None] * K + k[None, :]
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = acc
        for at in range(0, K, BLOCK_K):
            inside = (k < K - at)[None, :]
            x = tl.load(x_at + at, mask=real[:, None] & inside, other=0.0)
            if COPIED:
                w = weight_tiles.load([first_row, at])
            else:
                w = tl.load(w_at + at, mask=(n < N)[:, None] & inside, other=0.0)
            acc += dot(w, tl.trans(x))
            if GATED:
                if COPIED:
                    w = weight_tiles.load([first_row + N, at])
                else:
                    w = tl.load(w_at + N * K + at, mask=(n < N)[:, None] & inside, other=0.0)
                up += dot(w, tl.trans(x))
        let_next_begin(EARLY)
        if P:
            p = tl.arange(0, BLOCK_P)[None, :]
            parts = real[:, None] & (p < P)
            squares = tl.load(squares_ptr + row[:, None] * P + p, mask=parts, other=0.0)
            factor = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[None, :]
            acc *= factor
            up *= factor
        if GATED:
            acc = gated(acc, up)
        else:
            acc *= tl.load(shares_ptr + pair, mask=real, other=0.0)[None, :]
        out_at = out_ptr + pair[None, :] * N + n[:, None]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=real[None, :] & (n < N)[:, None])


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    parts_ptr, residual_ptr, norm_ptr, out_ptr, product_ptr, squares_ptr,
    K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a part of a row: the sum of its experts' outputs and the residual, times the norm."""
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < H
    await_inputs(EARLY)
    norm = tl.load(norm_ptr + n, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * H + n, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        total += tl.load(parts_ptr + (row * K + k) * H + n, mask=inside, other=0.0)
    rounded = (residual + total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * H + n, rounded, mask=inside)
    wide = rounded.to(tl.float32)
    tl.store(product_ptr + row * H + n, (wide * norm).to(product_ptr.dtype.element_ty), mask=inside)
    tl.store(squares_ptr + row * tl.num_programs(1) + tl.program_id(1), tl.sum(wide * wide, axis=0))
    let_next_begin(EARLY)


@triton.jit
def _activate_kernel(  # type: ignore[no-untyped-def]
    gates_ptr, squares_ptr, out_ptr, eps,
    N: tl.constexpr, K: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr,
    PER_ROW: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a part of a pair's `silu(gate) * up`, from products that lack their norm's factor."""
    pair = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p = tl.arange(0, BLOCK_P)
    inside = n < N
    await_inputs(EARLY)
    squares = tl.load(squares_ptr + pair // PER_ROW * P + p, mask=p < P, other=0.0)
    factor = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    gate_at = gates_ptr + pair * 2 * N + n
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32) * factor
    up = tl.load(gate_at + N, mask=inside, other=0.0).to(tl.float32) * factor
    tl.store(out_ptr + pair * N + n, gated(gate, up).to(out_ptr.dtype.element_ty), mask=inside)
    let_next_begin(EARLY)


def add_experts(
    x: Scaled, weights: ExpertWeights, residual: torch.Tensor, norm: torch.Tensor, eps: float
) -> tuple[torch.Tensor, Scaled]:
    """As `plain.few_rows.add_experts` defines; the router is a `Router`."""
    routed = weights.router.route_few(x, weights.per_token, weights.normalized)
    inner = expert_gates(x, weights.gate_up, routed.groups, weights.per_token)
    parts = expert_parts(inner, weights.down, routed.groups, routed.shares)
    return add_parts(parts, weights.per_token, residual, norm, eps)


def expert_gates(x: Scaled, weight: Stack, groups: Groups, per_row: int) -> torch.Tensor:
    """`silu(gate) * up` [N, I] for each pair, from its row's norm and its expert's matrix.

    weight is [E, 2 * I, hidden].
    """
    out = x.product.new_empty(len(groups.order), weight.shape[1] // 2)
    if isinstance(weight, ArrangedMatrix):
        gates = grouped_linear(x.product, weight, groups, None, out.dtype)
        _activate(x, gates, out, per_row)
        return out
    _launch(x.product, weight, out, groups, per_row, scaled=x)
    return out


def _activate(x: Scaled, gates: torch.Tensor, out: torch.Tensor, per_row: int) -> None:
    (num_pairs, size), width = out.shape, x.squares.shape[1]
    _activate_kernel[(num_pairs, cdiv(size, BLOCK_SUM))](
        gates, x.squares, out, x.eps,
        N=size, K=x.product.shape[1], P=width, BLOCK_P=next_power_of_2(width),
        PER_ROW=per_row, BLOCK=BLOCK_SUM, num_warps=4, **early(out.device),
    )  # fmt: skip


def expert_parts(
    x: torch.Tensor, weight: Stack, groups: Groups, shares: torch.Tensor
) -> torch.Tensor:
    """Each pair's row of x [N, I] times its expert's matrix, times its share: [N, hidden].

    weight is [E, hidden, I]; the result is float32.
    """
    if isinstance(weight, ArrangedMatrix):
        return grouped_linear(x, weight, groups, shares, torch.float32)
    out = x.new_empty(len(x), weight.shape[1], dtype=torch.float32)
    _launch(x, weight, out, groups, 1, shares=shares)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    groups: Groups,
    per_row: int,
    scaled: Scaled | None = None,
    shares: torch.Tensor | None = None,
) -> None:
    (num_experts, _, size_in), size_out = weight.shape, out.shape[1]
    assert x.is_contiguous() and weight.is_contiguous() and out.numel() < 1 << 31
    width = 0 if scaled is None else scaled.squares.shape[1]
    is_large = groups.block_m > LEAST
    block_k = BLOCK_K[is_large]
    copied = can_copy_tiles(x.device) and size_in * x.itemsize % 16 == 0
    _expert_rows_kernel[(groups.num_tiles, cdiv(size_out, BLOCK_N))](
        x, weight, tiles_of(weight.flatten(0, 1), BLOCK_N, block_k) if copied else None,
        out if scaled is None else scaled.squares, out if shares is None else shares, out,
        groups.order, groups.bounds, groups.tile_ends, 0.0 if scaled is None else scaled.eps,
        E=num_experts, N=size_out, K=size_in, P=width,
        BLOCK_P=next_power_of_2(max(1, width)), PER_ROW=per_row, GATED=scaled is not None,
        COPIED=copied, BLOCK_M=groups.block_m, BLOCK_N=BLOCK_N, BLOCK_K=block_k,
        BLOCK_E=next_power_of_2(num_experts), num_warps=4, num_stages=STAGES[is_large],
        **early(x.device),
    )  # fmt: skip


def add_parts(
    parts: torch.Tensor, per_row: int, residual: torch.Tensor, norm: torch.Tensor, eps: float
) -> tuple[torch.Tensor, Scaled]:
    """The residual [T, hidden] plus its pairs' parts [N, hidden]; the sum scaled by the norm."""
    num_rows, hidden = residual.shape
    total, product = torch.empty_like(residual), rows_with_room(num_rows, hidden, residual)
    columns = cdiv(hidden, BLOCK_SUM)
    squares = parts.new_empty(num_rows, columns)
    _sum_kernel[(num_rows, columns)](
        parts, residual, norm, total, product, squares,
        K=per_row, H=hidden, BLOCK=BLOCK_SUM, num_warps=4, **early(residual.device),
    )  # fmt: skip
    return total, Scaled(product, squares, eps)
