"""Products of few pairs of a token and an expert with dense weights, with what follows them.

N pairs, E experts. A program computes a tile of one expert's pairs. On Hopper GPUs the tensor
memory accelerator copies the tiles of weights. Sums are float32, over all inputs in their order.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.operands.scaled import Scaled
from nanovllm.kernels.triton.common import (
    await_inputs,
    can_copy_tiles,
    dot,
    early,
    let_next_begin,
    num_multiprocessors,
    tiles_of,
)
from nanovllm.kernels.triton.experts.grouping import LEAST, Groups, find_tile, group
from nanovllm.kernels.triton.linear.silu_and_mul import gated, gated_as_stored

BLOCK_N = 64
# For the smallest tiles, and for larger ones; a multiprocessor runs two programs, or one with MORE.
BLOCK_K, STAGES, MORE = (128, 64), (3, 4), 4


@triton.jit
def _expert_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, weight_tiles, squares_ptr, shares_ptr, out_ptr, order_ptr, bounds_ptr,
    tile_ends_ptr, eps,
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr,
    PER_ROW: tl.constexpr, GATED: tl.constexpr, ROUNDED: tl.constexpr, COPIED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of a tile of pairs: GATED, `silu(gate) * up`; else times the pairs' shares.

    ROUNDED: gates and ups are rounded to the type of the outputs before the activation.

    PER_ROW pairs share a row of x. The rows' factor is computed from P parts of their sums of
    squares.
    """
    await_inputs(EARLY)
    expert, place, real = find_tile(
        tl.program_id(0), bounds_ptr, tile_ends_ptr, E, BLOCK_M, BLOCK_E
    )
    if expert < E:
        pair = tl.load(order_ptr + place, mask=real, other=0).to(tl.int64)
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
            acc = dot(w, tl.trans(x), acc)
            if GATED:
                if COPIED:
                    w = weight_tiles.load([first_row + N, at])
                else:
                    w = tl.load(w_at + N * K + at, mask=(n < N)[:, None] & inside, other=0.0)
                up = dot(w, tl.trans(x), up)
        let_next_begin(EARLY)
        if P:
            p = tl.arange(0, BLOCK_P)[None, :]
            parts = real[:, None] & (p < P)
            squares = tl.load(squares_ptr + row[:, None] * P + p, mask=parts, other=0.0)
            factor = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[None, :]
            acc *= factor
            up *= factor
        if ROUNDED:
            like = out_ptr.dtype.element_ty
            acc = gated_as_stored(acc.to(like), up.to(like))
        elif GATED:
            acc = gated(acc, up)
        else:
            acc *= tl.load(shares_ptr + pair, mask=real, other=0.0)[None, :]
        out_at = out_ptr + pair[None, :] * N + n[:, None]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=real[None, :] & (n < N)[:, None])


def takes(x: torch.Tensor) -> bool:
    """Whether `multiply` is faster than `grouped_linear`: on Hopper GPUs."""
    return x.dtype == torch.bfloat16 and can_copy_tiles(x.device)


def multiply_pairs(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    groups: Groups,
    per_row: int,
    *,
    is_gated: bool = False,
    rounded: bool = False,
    scaled: Scaled | None = None,
    shares: torch.Tensor | None = None,
) -> None:
    """For each pair, write its row of x times its expert's matrix.

    `per_row` pairs share a row. Results are `silu(gate) * up` if `is_gated`, of `scaled` rows times
    their norm's factor; else they are multiplied by the pairs' shares. If `rounded`, gates and ups
    are rounded to the type of `out` before their activation.
    """
    (num_experts, _, size_in), size_out = weight.shape, out.shape[1]
    assert x.is_contiguous() and weight.is_contiguous()
    width = 0 if scaled is None else scaled.squares.shape[1]
    is_large = groups.block_m > LEAST
    block_k = BLOCK_K[is_large]
    columns, stages = cdiv(size_out, BLOCK_N), STAGES[is_large]
    if groups.num_tiles * columns <= num_multiprocessors(x.device):
        stages = MORE
    copied = can_copy_tiles(x.device) and size_in * x.itemsize % 16 == 0
    _expert_rows_kernel[(groups.num_tiles, columns)](
        x, weight, tiles_of(weight.flatten(0, 1), BLOCK_N, block_k) if copied else None,
        out if scaled is None else scaled.squares, out if shares is None else shares, out,
        groups.order, groups.bounds, groups.tile_ends, 0.0 if scaled is None else scaled.eps,
        E=num_experts, N=size_out, K=size_in, P=width,
        BLOCK_P=next_power_of_2(max(1, width)), PER_ROW=per_row, GATED=is_gated,
        ROUNDED=is_gated and rounded, COPIED=copied, BLOCK_M=groups.block_m, BLOCK_N=BLOCK_N,
        BLOCK_K=block_k, BLOCK_E=next_power_of_2(num_experts), num_warps=4, num_stages=stages,
        **early(x.device),
    )  # fmt: skip


def multiply(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
    rounded: bool = False,
) -> torch.Tensor:
    """The outputs [N, hidden] of all pairs, times their shares, in float32.

    If `rounded`, outputs, gates and ups are rounded to the type of x. Outputs of other ranks'
    experts are not written.
    """
    num_pairs, (num_here, hidden, size) = expert_ids.numel(), down.shape
    groups = group(expert_ids, num_here, num_experts)
    inner = x.new_empty(num_pairs, size)
    multiply_pairs(x, gate_up, inner, groups, expert_ids.shape[1], is_gated=True, rounded=rounded)
    out = x.new_empty(num_pairs, hidden, dtype=x.dtype if rounded else torch.float32)
    multiply_pairs(inner, down, out, groups, 1, shares=shares)
    return out
