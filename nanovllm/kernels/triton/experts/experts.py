"""Experts as two grouped matrix products: each tile of rows is multiplied by its expert's weights.

On Hopper GPUs dense weights have kernels of their own: `many_pairs`, and `expert_rows` for fewer.

T tokens, K experts of each, N = T * K pairs of a token and an expert, E experts of this rank. Pairs
are in the order of tokens, except in `order`, which sorts them by expert. Nothing syncs, and all
shapes depend only on those of the arguments, so CUDA graphs can contain the kernels. Every pair has
a row; the rows of other ranks' experts are neither written nor read.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.operands.low_rank import PairAdditions
from nanovllm.kernels.triton.common import can_copy_tiles, dot
from nanovllm.kernels.triton.experts import expert_rows, many_pairs
from nanovllm.kernels.triton.experts.grouping import Groups, find_tile, group
from nanovllm.kernels.triton.linear.arranged import ArrangedMatrix
from nanovllm.kernels.triton.linear.dequantize import dequantize
from nanovllm.kernels.triton.linear.quantized_rows import add_product, load_scales
from nanovllm.kernels.triton.linear.silu_and_mul import BLOCK, activate

BLOCK_N, BLOCK_K = 64, 64
Stack = torch.Tensor | ArrangedMatrix  # a matrix for each expert: [E, out, in]
Activation = Callable[[torch.Tensor], torch.Tensor]  # instead of silu


@triton.jit
def _store_pairs(  # type: ignore[no-untyped-def]
    acc, out_ptr, shares_ptr, pair, real, n, size_out, SHARES: tl.constexpr
):  # fmt: skip
    """Store outputs n of the pairs that are real, times the pairs' shares if SHARES."""
    if SHARES:
        acc *= tl.load(shares_ptr + pair, mask=real, other=0.0)[:, None]
    out_at = out_ptr + pair[:, None] * size_out + n[None, :]
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_at, out, mask=real[:, None] & (n < size_out)[None, :])


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
            acc = dot(x, w, acc)
        _store_pairs(acc, out_ptr, shares_ptr, pair, real, n, size_out, SHARES)


@triton.jit
def _grouped_quantized_kernel(  # type: ignore[no-untyped-def]
    x_ptr, words_ptr, scales_ptr, zeros_ptr, out_ptr, order_ptr, bounds_ptr, tile_ends_ptr,
    shares_ptr, num_experts,
    N: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, SCALE_ROWS: tl.constexpr, KIND: tl.constexpr,
    ZEROS: tl.constexpr, PER_ROW: tl.constexpr, SHARES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`_grouped_linear_kernel` for codes. Rows are not rounded, as in `quantized_rows`."""
    expert, place, real = find_tile(
        tl.program_id(0), bounds_ptr, tile_ends_ptr, num_experts, BLOCK_M, BLOCK_E
    )
    FOUR: tl.constexpr = KIND == "int4"  # noqa: N806
    if expert < num_experts:
        pair = tl.load(order_ptr + place, mask=real, other=0).to(tl.int64)
        first_n = tl.program_id(1) * BLOCK_N
        n = first_n + tl.arange(0, BLOCK_N)
        inside_n = tl.minimum(n, N - 1)
        b = tl.arange(0, INNER)
        matrix = expert.to(tl.int64)
        STEP: tl.constexpr = INNER * (1 + FOUR)  # noqa: N806
        WORDS: tl.constexpr = INNER // 4  # noqa: N806
        row_words: tl.constexpr = PADDED // STEP * WORDS
        x_at = x_ptr + (pair // PER_ROW)[:, None] * K + b[None, :]
        w = tl.arange(0, WORDS)
        words_at = words_ptr + (matrix * N + inside_n)[:, None] * row_words + w[None, :]
        scales_ptr += matrix * (GROUPS * COLUMNS)
        zeros_ptr += matrix * (GROUPS * COLUMNS)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if not GROUP:
            scales, zeros = load_scales(
                scales_ptr, None, zeros_ptr, None, first_n, 0, N, GROUPS, GROUP, COLUMNS,
                SCALE_ROWS, ZEROS, BLOCK_N, False,
            )  # fmt: skip
        for k in tl.range(0, PADDED, STEP, num_stages=STAGES):
            words = tl.load(words_at + k // STEP * WORDS)
            for half in tl.static_range(1 + FOUR):
                at_k = k + half * INNER
                inside = real[:, None]
                if PADDED != K:
                    inside &= (at_k + b < K)[None, :]
                x = tl.load(x_at + at_k, mask=inside, other=0.0)
                if GROUP:
                    scales, zeros = load_scales(
                        scales_ptr, None, zeros_ptr, None, first_n, at_k, N, GROUPS, GROUP, COLUMNS,
                        SCALE_ROWS, ZEROS, BLOCK_N, False,
                    )  # fmt: skip
                acc = add_product(acc, x, words, scales, zeros, True, KIND, half, ZEROS)
        _store_pairs(tl.trans(acc), out_ptr, shares_ptr, pair, real, n, N, SHARES)


def grouped_linear(
    x: torch.Tensor,
    weight: Stack,
    groups: Groups,
    shares: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """For each pair of this rank, multiply its row of x by its expert's matrix.

    Rows of x are tokens [T, in] or pairs [N, in]. The result has a row for each pair [N, out],
    multiplied by `shares` [N] in float32 if given. Bytes moved: the weights of each expert with
    pairs, once for each of its tiles.
    """
    if isinstance(weight, ArrangedMatrix):
        if weight.order is not None:
            x = x[:, weight.order]
        if not weight.has_rows_kernel:
            weight = dequantize(weight, x.dtype)
    num_pairs, (num_experts, size_out, size_in) = len(groups.order), weight.shape
    assert x.is_contiguous() and x.shape[1] == size_in
    out = x.new_empty(num_pairs, size_out, dtype=dtype)
    tables = groups.order, groups.bounds, groups.tile_ends, out if shares is None else shares
    options = dict(
        PER_ROW=num_pairs // len(x), SHARES=shares is not None, BLOCK_M=groups.block_m,
        BLOCK_E=next_power_of_2(num_experts), num_warps=4,
    )  # fmt: skip
    if isinstance(weight, torch.Tensor):
        assert weight.is_contiguous()
        _grouped_linear_kernel[(groups.num_tiles, cdiv(size_out, BLOCK_N))](
            x, weight, out, *tables, num_experts, size_in, size_out,
            BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, **options,
        )  # fmt: skip
        return out
    few = groups.block_m < 64
    outputs = BLOCK_N if few or can_copy_tiles(x.device) else BLOCK_N // 2  # registers limit it
    _grouped_quantized_kernel[(groups.num_tiles, cdiv(size_out, outputs))](
        x, weight.words, weight.scales, weight.scales if weight.zeros is None else weight.zeros,
        out, *tables, num_experts, N=size_out, K=size_in, PADDED=weight.padded_in,
        BLOCK_N=outputs, STAGES=3 if few else 2, **weight.constants, **options,
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
    gate_up: Stack,
    down: Stack,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
    activation: Activation | None = None,
) -> torch.Tensor:
    """For each row of x [T, hidden], the sum of its K experts' outputs, weighted by `shares`.

    Arguments are those of `plain/experts.py`. A row adds up its experts in the order of its
    expert_ids. Peak memory: N rows of gate and up, and N rows of the output in float32, or less for
    many pairs; only the rows of this rank's experts are used.
    """
    return compute(x, gate_up, down, expert_ids, shares, num_experts, None, activation)


def adapted_experts(
    x: torch.Tensor,
    gate_up: Stack,
    down: Stack,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
    additions: PairAdditions | None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """As `experts`, with the kernels for any weights, and adapters added to both products."""
    return compute(x, gate_up, down, expert_ids, shares, num_experts, additions, activation)


def compute(
    x: torch.Tensor,
    gate_up: Stack,
    down: Stack,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
    additions: PairAdditions | None,
    activation: Activation | None,
    rounded: bool = False,
) -> torch.Tensor:
    """`experts`, or `adapted_experts` if there are additions: choose the kernels.

    If `rounded`, all kernels round gates, ups and an expert's outputs to the type of x. Else each
    rounds what it stores.
    """
    expert_ids, shares = expert_ids.contiguous(), shares.contiguous()
    is_alone = activation is None and not additions
    if is_alone and isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor):
        operands = x, gate_up, down, expert_ids, shares, num_experts, rounded
        if many_pairs.takes(x, down, expert_ids.numel(), num_experts):
            return add_up(x, many_pairs.multiply(*operands), expert_ids, len(down))
        if expert_rows.takes(x):
            return add_up(x, expert_rows.multiply(*operands), expert_ids, len(down))
    num_pairs, (num_here, _, size) = expert_ids.numel(), down.shape
    groups = group(expert_ids, num_here, num_experts)
    gates = grouped_linear(x, gate_up, groups, None, x.dtype)
    if additions:
        additions.add_gates(x, gates)
    if activation is not None:
        inner = activation(gates)  # of other ranks' pairs, too, which nothing reads
    else:
        inner = x.new_empty(num_pairs, size)
        _activate_kernel[(num_pairs, cdiv(size, BLOCK))](
            gates, inner, expert_ids, num_here, size, BLOCK=BLOCK, num_warps=8
        )
    parts = grouped_linear(inner, down, groups, shares, x.dtype if rounded else torch.float32)
    if additions:
        additions.add_outputs(inner, parts, shares.flatten())
    return add_up(x, parts, expert_ids, num_here)


def add_up(
    x: torch.Tensor, parts: torch.Tensor, expert_ids: torch.Tensor, num_here: int
) -> torch.Tensor:
    """For each row of x, the sum of its pairs' parts, for experts of this rank."""
    (num_rows, per_row), hidden = expert_ids.shape, x.shape[1]
    out = torch.empty_like(x)
    _add_up_kernel[(num_rows, cdiv(hidden, BLOCK))](
        parts, out, expert_ids, num_here, per_row, hidden, BLOCK=BLOCK, num_warps=8
    )
    return out
