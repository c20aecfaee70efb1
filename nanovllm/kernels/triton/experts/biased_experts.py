"""Layers of experts with biases and a clamped gate: see `ExpertBiases`.

The two products of plain weights are those of `experts.py`. The kernel of the gate adds the first
bias, and the one that adds up a row's experts the second. Weights in MXFP4 have the products of
`mx_experts.py`, which add both. Shapes are those of `experts.py`.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.operands.expert_biases import ExpertBiases
from nanovllm.kernels.operands.low_rank import PairAdditions
from nanovllm.kernels.triton.common import await_inputs, early, let_next_begin
from nanovllm.kernels.triton.experts.clamped_gate import clamped_gate
from nanovllm.kernels.triton.experts.experts import Stack, grouped_linear
from nanovllm.kernels.triton.experts.grouping import group, tile_pairs
from nanovllm.kernels.triton.experts.mx_experts import (
    begins_early,
    mx_linear,
    mx_parts,
    rows_of_tile,
)
from nanovllm.kernels.triton.experts.mx_stack import MxStack
from nanovllm.kernels.triton.linear.silu_and_mul import BLOCK


@triton.jit
def _clamped_gate_kernel(  # type: ignore[no-untyped-def]
    x_ptr, bias_ptr, out_ptr, ids_ptr, num_here, size, alpha, limit, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK values of a pair. Sums are float32; results are rounded once."""
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids_ptr + pair)
    if (expert >= 0) & (expert < num_here):
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = n < size
        x_at = x_ptr + pair * 2 * size + n
        bias_at = bias_ptr + expert.to(tl.int64) * 2 * size + n
        gate = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
        gate += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x_at + size, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias_at + size, mask=inside, other=0.0).to(tl.float32)
        out = clamped_gate(gate, up, alpha, limit)
        tl.store(out_ptr + pair * size + n, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, bias_ptr, out_ptr, ids_ptr, shares_ptr, num_here, per_row, size, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK outputs of a row: its pairs' parts, and biases times the pairs' shares."""
    await_inputs(EARLY)
    let_next_begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for pair in range(row * per_row, (row + 1) * per_row):
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        wanted = (n < size) & (expert >= 0) & (expert < num_here)
        total += tl.load(x_ptr + pair * size + n, mask=wanted, other=0.0)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert * size + n, mask=wanted, other=0.0)
            total += bias.to(tl.float32) * tl.load(shares_ptr + pair)
    tl.store(out_ptr + row * size + n, total.to(out_ptr.dtype.element_ty), mask=n < size)


def biased_experts(
    x: torch.Tensor,
    gate_up: Stack | MxStack,
    down: Stack | MxStack,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
    biases: ExpertBiases,
    additions: PairAdditions | None = None,
) -> torch.Tensor:
    """As `plain/biased_experts.py` defines.

    Both matrices are in MXFP4, or none. With `additions`, which come between a product and what
    follows it, nothing is fused. Peak memory: N rows of gate and up, and N rows of the output in
    float32; `mx_parts` takes less.
    """
    return compute(x, gate_up, down, expert_ids, shares, num_experts, biases, additions)


def compute(
    x: torch.Tensor,
    gate_up: Stack | MxStack,
    down: Stack | MxStack,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
    biases: ExpertBiases,
    additions: PairAdditions | None,
    rounded: bool = False,
) -> torch.Tensor:
    """`biased_experts`; `rounded` is as in `experts.compute`: then a row has one order of sums.

    The biases are then added to the rounded products in any case.
    """
    expert_ids, shares = expert_ids.contiguous(), shares.contiguous()
    num_here, _, size = down.shape
    groups: Any = None
    linear: Any = grouped_linear
    if isinstance(gate_up, MxStack) and isinstance(down, MxStack):
        if not additions:
            last = biases.down if rounded else None
            parts = mx_parts(x, gate_up, down, expert_ids, shares, num_experts, biases, rounded)
            return _add_up(x, parts, last, expert_ids, shares, num_here)
        rows = rows_of_tile(expert_ids.numel(), num_experts, x.dtype)
        groups, linear = tile_pairs(expert_ids, num_here, rows), mx_linear
    else:
        groups = group(expert_ids, num_here, num_experts)
    gates = linear(x, gate_up, groups, None, x.dtype)
    if additions:
        additions.add_gates(x, gates)
    inner = x.new_empty(expert_ids.numel(), size)
    _clamped_gate_kernel[(len(inner), cdiv(size, BLOCK))](
        gates, biases.gate_up, inner, expert_ids, num_here, size, biases.alpha, biases.limit,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    parts = linear(inner, down, groups, shares, x.dtype if rounded else torch.float32)
    if additions:
        additions.add_outputs(inner, parts, shares.flatten())
    return _add_up(x, parts, biases.down, expert_ids, shares, num_here)


def _add_up(
    x: torch.Tensor,
    parts: torch.Tensor,
    bias: torch.Tensor | None,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_here: int,
) -> torch.Tensor:
    """For each row of x, the sum of its pairs' parts and biases, for experts of this rank."""
    (num_rows, per_row), hidden, out = expert_ids.shape, x.shape[1], torch.empty_like(x)
    _add_up_kernel[(num_rows, cdiv(hidden, BLOCK))](
        parts, bias, out, expert_ids, shares, num_here, per_row, hidden, BLOCK=BLOCK, num_warps=8,
        **(early(x.device) if begins_early(expert_ids.numel()) else {"EARLY": False}),
    )  # fmt: skip
    return out
