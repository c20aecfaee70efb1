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
from nanovllm.kernels.triton.common import await_inputs, early, let_next_begin, rows_with_room
from nanovllm.kernels.triton.experts.expert_rows import multiply_pairs
from nanovllm.kernels.triton.experts.experts import Stack, grouped_linear
from nanovllm.kernels.triton.experts.grouping import Groups
from nanovllm.kernels.triton.linear.arranged import ArrangedMatrix
from nanovllm.kernels.triton.linear.silu_and_mul import gated

BLOCK_SUM = 512


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
    routed = weights.router.route_few(x)
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
    multiply_pairs(x.product, weight, out, groups, per_row, is_gated=True, scaled=x)
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
    multiply_pairs(x, weight, out, groups, 1, shares=shares)
    return out


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
