"""Layers of experts with biases and a clamped gate: see `ExpertBiases`.

The two products are those of `experts.py`. The kernel of the gate adds the first bias, and the one
that adds up a row's experts the second. Shapes are those of `experts.py`.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.operands.expert_biases import ExpertBiases
from nanovllm.kernels.operands.low_rank import PairAdditions
from nanovllm.kernels.triton.experts.experts import Stack, grouped_linear
from nanovllm.kernels.triton.experts.grouping import group
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
        gate = tl.where(gate > limit, limit, gate)  # as in PyTorch, NaN stays
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        out = (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
        tl.store(out_ptr + pair * size + n, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, bias_ptr, out_ptr, ids_ptr, shares_ptr, num_here, per_row, size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK outputs of a row: its pairs' parts, and biases times the pairs' shares."""
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
    gate_up: Stack,
    down: Stack,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
    biases: ExpertBiases,
    additions: PairAdditions | None = None,
) -> torch.Tensor:
    """As `plain/biased_experts.py` defines.

    Peak memory: N rows of gate and up, and N rows of the output in float32.
    """
    expert_ids, shares = expert_ids.contiguous(), shares.contiguous()
    (num_rows, per_row), (num_here, hidden, size) = expert_ids.shape, down.shape
    groups = group(expert_ids, num_here, num_experts)
    gates = grouped_linear(x, gate_up, groups, None, x.dtype)
    if additions:
        additions.add_gates(x, gates)
    inner, out = x.new_empty(expert_ids.numel(), size), torch.empty_like(x)
    _clamped_gate_kernel[(len(inner), cdiv(size, BLOCK))](
        gates, biases.gate_up, inner, expert_ids, num_here, size, biases.alpha, biases.limit,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    parts = grouped_linear(inner, down, groups, shares, torch.float32)
    if additions:
        additions.add_outputs(inner, parts, shares.flatten())
    _add_up_kernel[(num_rows, cdiv(hidden, BLOCK))](
        parts, biases.down, out, expert_ids, shares, num_here, per_row, hidden, BLOCK=BLOCK,
        num_warps=8,
    )  # fmt: skip
    return out
