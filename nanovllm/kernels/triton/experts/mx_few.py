"""Products of few pairs of a token and an expert with weights in MXFP4: see `MxStack`.

Each pair reads its expert's matrix, so pairs need not be grouped. There are few programs, so
several share a tile of outputs, each with a part of the inputs, and the last one to finish adds up
the parts in their order. A program loads the codes of its part into registers at once, those of the
second product while the first one ends.

Sums: float32, over runs of 128 inputs one after the other within a part, then over the parts.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.operands.expert_biases import ExpertBiases
from nanovllm.kernels.triton.common import (
    await_inputs,
    can_copy_tiles,
    dot,
    early,
    leave_parts,
    let_next_begin,
    sum_parts,
)
from nanovllm.kernels.triton.experts.clamped_gate import Gate, clamped_gate
from nanovllm.kernels.triton.experts.mx_stack import RUN, MxStack
from nanovllm.kernels.triton.experts.mx_values import hold_mx_words, mx_values
from nanovllm.kernels.triton.linear.block_values import lanes

MOST_PAIRS = 16
OUTPUTS = 64  # of a program
COLUMNS = 16  # of a tensor core's right matrix, of which the first one is the pair's row
HELD_RUNS = 4  # the most of a program: with 3, four tokens take 3% longer


@triton.jit
def _mx_few_kernel(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, scales_ptr, bias_ptr, shares_ptr, out_ptr, ids_ptr, parts_ptr, arrivals_ptr,
    num_here, size, alpha, limit,
    N: tl.constexpr, K: tl.constexpr, RUN: tl.constexpr, IS_WIDE: tl.constexpr,
    PER_ROW: tl.constexpr, GATED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A part of the inputs for BLOCK_N outputs of a pair. Pairs of other ranks are left out.

    GATED: PER_ROW pairs share a row of x, the token. Else each pair has a row. `size` is the number
    of outputs of all pairs.
    """
    pair, split = tl.program_id(1), tl.program_id(2)
    if GATED:  # the kernel before this one chooses the experts
        await_inputs(EARLY)
        let_next_begin(EARLY)
    expert = tl.load(ids_ptr + pair)
    is_here = (expert >= 0) & (expert < num_here)
    k = tl.arange(0, RUN)
    is_first = tl.arange(0, COLUMNS) == 0
    x_ptr += (pair // PER_ROW if GATED else pair) * K
    first_n = tl.program_id(0) * BLOCK_N
    n, other_n = lanes(first_n, N, BLOCK_N)
    RUNS: tl.constexpr = (K + RUN - 1) // RUN  # noqa: N806
    SHARE: tl.constexpr = (RUNS + SPLIT - 1) // SPLIT  # noqa: N806
    ROWS: tl.constexpr = N * (1 + GATED)  # of the matrix  # noqa: N806
    matrix = expert.to(tl.int64) * (RUNS * ROWS)
    codes_ptr += matrix * 16
    scales_ptr += matrix
    first, end = split * SHARE, tl.where(is_here, RUNS, 0)
    held = hold_mx_words(codes_ptr, scales_ptr, n, other_n, first, end, ROWS, SHARE)
    if GATED:
        ups = hold_mx_words(codes_ptr, scales_ptr, N + n, N + other_n, first, end, ROWS, SHARE)
    if not GATED:
        await_inputs(EARLY)
        let_next_begin(EARLY)
    if is_here:
        acc = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
        up = acc
        x_at = tl.broadcast_to(x_ptr + k[None, :], [COLUMNS, RUN])
        rows = ()
        for i in tl.static_range(SHARE):
            first_k = (first + i) * RUN
            inside = (k < K - first_k)[None, :] & is_first[:, None]
            rows += (tl.load(x_at + first_k, mask=inside, other=0.0),)  # type: ignore[assignment]
        for i in tl.static_range(SHARE):
            acc = dot(mx_values(held[i], rows[i], IS_WIDE), tl.trans(rows[i]), acc)
            if GATED:
                up = dot(mx_values(ups[i], rows[i], IS_WIDE), tl.trans(rows[i]), up)
        acc = tl.sum(tl.where(is_first[None, :], acc, 0.0), axis=1)
        up = tl.sum(tl.where(is_first[None, :], up, 0.0), axis=1) if GATED else acc
        out_n = first_n + tl.arange(0, BLOCK_N)
        real, at = out_n < N, pair * N + out_n
        tile = pair * tl.num_programs(0) + tl.program_id(0)
        finishes = leave_parts(acc, up, parts_ptr, arrivals_ptr, tile, split, size, at, real,
                               SPLIT, GATED)  # fmt: skip
        if finishes:
            acc, up = sum_parts(acc, up, parts_ptr, arrivals_ptr, tile, size, at, real, SPLIT,
                                GATED, True)  # fmt: skip
            if bias_ptr is not None:
                bias_at = bias_ptr + expert * ROWS + out_n
                acc += tl.load(bias_at, mask=real, other=0.0).to(tl.float32)
                if GATED:
                    up += tl.load(bias_at + N, mask=real, other=0.0).to(tl.float32)
            if GATED:
                acc = clamped_gate(acc, up, alpha, limit)
            else:
                acc *= tl.load(shares_ptr + pair)
            tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=real)


def takes_few(x: torch.Tensor, num_pairs: int) -> bool:
    """Whether this is faster than to group the pairs: on Hopper GPUs, where it was measured."""
    return 0 < num_pairs <= MOST_PAIRS and x.dtype.itemsize == 2 and can_copy_tiles(x.device)


def few_parts(
    x: torch.Tensor,
    gate_up: MxStack,
    down: MxStack,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    biases: ExpertBiases,
) -> torch.Tensor:
    """As `mx_parts`, in float32."""
    num_pairs, (_, hidden, size) = expert_ids.numel(), down.shape
    inner = x.new_empty(num_pairs, size)
    gate = Gate(biases.alpha, biases.limit, expert_ids.shape[1])
    _multiply(x, gate_up, biases.gate_up, shares, inner, expert_ids, gate)
    out = x.new_empty(num_pairs, hidden, dtype=torch.float32)
    _multiply(inner, down, biases.down, shares, out, expert_ids)
    return out


def _multiply(
    x: torch.Tensor,
    weight: MxStack,
    bias: torch.Tensor | None,
    shares: torch.Tensor,
    out: torch.Tensor,
    expert_ids: torch.Tensor,
    gate: Gate | None = None,
) -> None:
    """One product: of tokens with a gate, or of pairs."""
    (num_pairs, size_out), size_in = out.shape, x.shape[1]
    columns = cdiv(size_out, OUTPUTS)
    splits = cdiv(cdiv(size_in, RUN), HELD_RUNS)
    parts = out  # not used
    if splits > 1:
        parts = x.new_empty(splits, 1 + (gate is not None), *out.shape, dtype=torch.float32)
    alpha, limit, per_row = gate or (0.0, 0.0, 1)
    assert num_pairs * columns <= len(weight.arrivals)
    _mx_few_kernel[(columns, num_pairs, splits)](
        x, weight.codes, weight.scales, bias, shares, out, expert_ids, parts, weight.arrivals,
        weight.shape[0], out.numel(), alpha, limit,
        N=size_out, K=size_in, RUN=RUN, IS_WIDE=weight.is_wide, PER_ROW=per_row,
        GATED=gate is not None, COLUMNS=COLUMNS, BLOCK_N=OUTPUTS, SPLIT=splits, num_warps=4,
        **early(x.device),
    )  # fmt: skip
