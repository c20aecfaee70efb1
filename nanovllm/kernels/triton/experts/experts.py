"""Experts as two grouped matrix products: each tile of rows is multiplied by its expert's weights.

Many pairs of dense weights have kernels of their own, in `many_pairs`.

T tokens, K experts of each, N = T * K pairs of a token and an expert, E experts of this rank. Pairs
are in the order of tokens, except in `order`, which sorts them by expert. Nothing syncs, and all
shapes depend only on those of the arguments, so CUDA graphs can contain the kernels. Every pair has
a row; the rows of other ranks' experts are neither written nor read.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.operands.low_rank import PairAdditions
from nanovllm.kernels.triton.common import dot
from nanovllm.kernels.triton.experts import many_pairs
from nanovllm.kernels.triton.experts.grouping import Groups, find_tile, group
from nanovllm.kernels.triton.experts.quantized_experts import grouped_quantized
from nanovllm.kernels.triton.linear.arranged import ArrangedMatrix
from nanovllm.kernels.triton.linear.dequantize import dequantize
from nanovllm.kernels.triton.linear.silu_and_mul import BLOCK, activate

BLOCK_N, BLOCK_K = 64, 64


@triton.jit
def _grouped_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr, experts_ptr, out_ptr, order_ptr, bounds_ptr, tile_ends_ptr, shares_ptr,
    num_experts, size_in, size_out, PER_ROW: tl.constexpr, SHARES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_N outputs of one tile's rows; surplus programs do nothing."""
    expert, place, real = find_tile(
        tl.program_id(0), bounds_ptr, tile_ends_ptr, num_experts, BLOCK_M, BLOCK_E
    )
    if expert < num_experts:
        pair = tl.load(order_ptr + place, mask=real, other=0).to(tl.int64)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = n < size_out
        k = tl.arange(0, BLOCK_K)
        x_at = x_ptr + (pair // PER_ROW)[:, None] * size_in + k[None, :]
        row = expert.to(tl.int64) * size_out + n
        weight_at = experts_ptr + row[None, :] * size_in + k[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for at in range(0, size_in, BLOCK_K):
            left = k < size_in - at
            x = tl.load(x_at + at, mask=real[:, None] & left[None, :], other=0.0)
            w = tl.load(weight_at + at, mask=inside[None, :] & left[:, None], other=0.0)
            acc += dot(x, w)
        if SHARES:
            acc *= tl.load(shares_ptr + pair, mask=real, other=0.0)[:, None]
        out_at = out_ptr + pair[:, None] * size_out + n[None, :]
        out = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_at, out, mask=real[:, None] & inside[None, :])


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor | ArrangedMatrix,
    groups: Groups,
    shares: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """For each pair of this rank, multiply its row of x by its expert's matrix of weight [E, out,
    in].

    Rows of x are tokens [T, in] or pairs [N, in]. The result has a row for each pair [N, out],
    multiplied by `shares` [N] in float32 if given. Bytes moved: the weights of each expert with
    pairs, once for each of its tiles.
    """
    if isinstance(weight, ArrangedMatrix):
        if weight.order is not None:
            x = x[:, weight.order]
        if weight.has_rows_kernel:
            return grouped_quantized(x, weight, groups, shares, dtype)
        weight = dequantize(weight, x.dtype)
    num_pairs, (num_experts, size_out, size_in) = len(groups.order), weight.shape
    assert x.is_contiguous() and weight.is_contiguous() and x.shape[1] == size_in
    out = x.new_empty(num_pairs, size_out, dtype=dtype)
    _grouped_linear_kernel[(groups.num_tiles, cdiv(size_out, BLOCK_N))](
        x, weight, out, groups.order, groups.bounds, groups.tile_ends,
        out if shares is None else shares, num_experts, size_in, size_out,
        PER_ROW=num_pairs // len(x), SHARES=shares is not None, BLOCK_M=groups.block_m,
        BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, BLOCK_E=next_power_of_2(num_experts), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _is_here(ids_ptr, pair, num_here):  # type: ignore[no-untyped-def]
    expert = tl.load(ids_ptr + pair)
    return (expert >= 0) & (expert < num_here)


@triton.jit
def _activate_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, ids_ptr, num_here, size, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    if _is_here(ids_ptr, pair, num_here):
        activate(x_ptr + pair * 2 * size, out_ptr + pair * size, size, BLOCK)


@triton.jit
def _add_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, ids_ptr, num_here, per_row, size, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for pair in range(row * per_row, (row + 1) * per_row):
        wanted = (n < size) & _is_here(ids_ptr, pair, num_here)
        total += tl.load(x_ptr + pair * size + n, mask=wanted, other=0.0)
    tl.store(out_ptr + row * size + n, total.to(out_ptr.dtype.element_ty), mask=n < size)


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor | ArrangedMatrix,
    down: torch.Tensor | ArrangedMatrix,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
) -> torch.Tensor:
    """For each row of x [T, hidden], the sum of its K experts' outputs, weighted by `shares`.

    Arguments are those of `plain/experts.py`. A row adds up its experts in the order of its
    expert_ids. Peak memory: N rows of gate and up, and N rows of the output in float32, or less for
    many pairs; only the rows of this rank's experts are used.
    """
    expert_ids, shares = expert_ids.contiguous(), shares.contiguous()
    parts = _parts(x, gate_up, down, expert_ids, shares, num_experts)
    return _add_up(x, parts, expert_ids, down.shape[0])


def adapted_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor | ArrangedMatrix,
    down: torch.Tensor | ArrangedMatrix,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
    additions: PairAdditions,
) -> torch.Tensor:
    """As `experts`, with adapters added to the outputs of both matrices."""
    expert_ids, shares = expert_ids.contiguous(), shares.contiguous()
    parts = _grouped_parts(x, gate_up, down, expert_ids, shares, num_experts, additions)
    return _add_up(x, parts, expert_ids, down.shape[0])


def _add_up(
    x: torch.Tensor, parts: torch.Tensor, expert_ids: torch.Tensor, num_here: int
) -> torch.Tensor:
    """For each row of x, the sum of its pairs' parts, for experts of this rank."""
    (num_rows, per_row), hidden = expert_ids.shape, x.shape[1]
    out = torch.empty_like(x)
    _add_up_kernel[(num_rows, cdiv(hidden, BLOCK))](
        parts, out, expert_ids, num_here, per_row, hidden, BLOCK=BLOCK, num_warps=8
    )
    return out


def _parts(
    x: torch.Tensor,
    gate_up: torch.Tensor | ArrangedMatrix,
    down: torch.Tensor | ArrangedMatrix,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
) -> torch.Tensor:
    """The outputs [N, hidden] of all pairs of this rank, times their shares."""
    num_pairs = expert_ids.numel()
    if (
        isinstance(gate_up, torch.Tensor)
        and isinstance(down, torch.Tensor)
        and many_pairs.takes(x, down, num_pairs, num_experts)
    ):
        return many_pairs.multiply(x, gate_up, down, expert_ids, shares, num_experts)
    return _grouped_parts(x, gate_up, down, expert_ids, shares, num_experts)


def _grouped_parts(
    x: torch.Tensor,
    gate_up: torch.Tensor | ArrangedMatrix,
    down: torch.Tensor | ArrangedMatrix,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
    additions: PairAdditions | None = None,
) -> torch.Tensor:
    """As `_parts`, with the kernels for any weights."""
    num_pairs, (num_here, _, size) = expert_ids.numel(), down.shape
    groups = group(expert_ids, num_here, num_experts)
    gates = grouped_linear(x, gate_up, groups, None, x.dtype)
    if additions:
        additions.add_gates(x, gates)
    inner = x.new_empty(num_pairs, size)
    _activate_kernel[(num_pairs, cdiv(size, BLOCK))](
        gates, inner, expert_ids, num_here, size, BLOCK=BLOCK, num_warps=8
    )
    parts = grouped_linear(inner, down, groups, shares, torch.float32)
    if additions:
        additions.add_outputs(inner, parts, shares.flatten())
    return parts
