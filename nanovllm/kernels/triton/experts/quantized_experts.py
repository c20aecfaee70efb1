"""Quantized experts as a grouped matrix product: `grouped_linear` for stacks of codes.

T tokens, K inputs, N outputs. Rows are not rounded, as in `quantized_rows`, whatever their number.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.triton.common import can_copy_tiles
from nanovllm.kernels.triton.experts.grouping import Groups, find_tile
from nanovllm.kernels.triton.linear.arranged import ArrangedMatrix
from nanovllm.kernels.triton.linear.quantized_rows import add_product, load_scales

BLOCK_N = 64


@triton.jit
def _grouped_quantized_kernel(  # type: ignore[no-untyped-def]
    x_ptr, words_ptr, scales_ptr, zeros_ptr, out_ptr, order_ptr, bounds_ptr, tile_ends_ptr,
    shares_ptr, num_experts,
    N: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, SCALE_ROWS: tl.constexpr, KIND: tl.constexpr,
    ZEROS: tl.constexpr, PER_ROW: tl.constexpr, SHARES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_N outputs of one tile's rows; surplus programs do nothing."""
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
        acc = tl.trans(acc)
        if SHARES:
            acc *= tl.load(shares_ptr + pair, mask=real, other=0.0)[:, None]
        out_at = out_ptr + pair[:, None] * N + n[None, :]
        out = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_at, out, mask=real[:, None] & (n < N)[None, :])


def grouped_quantized(
    x: torch.Tensor,
    weight: ArrangedMatrix,
    groups: Groups,
    shares: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`grouped_linear` for a stack of quantized matrices [E, out, in], in the order of x."""
    num_pairs, (num_experts, size_out, size_in) = len(groups.order), weight.shape
    assert x.is_contiguous() and x.shape[1] == size_in and weight.has_rows_kernel
    out = x.new_empty(num_pairs, size_out, dtype=dtype)
    few = groups.block_m < 64
    outputs = BLOCK_N if few or can_copy_tiles(x.device) else BLOCK_N // 2  # registers limit it
    _grouped_quantized_kernel[(groups.num_tiles, cdiv(size_out, outputs))](
        x, weight.words, weight.scales, weight.scales if weight.zeros is None else weight.zeros,
        out, groups.order, groups.bounds, groups.tile_ends, out if shares is None else shares,
        num_experts, N=size_out, K=size_in, PADDED=weight.padded_in,
        GROUPS=weight.scales.shape[-2], GROUP=weight.group, COLUMNS=weight.scales.shape[-1],
        SCALE_ROWS=weight.scale_rows, KIND=weight.kind, ZEROS=weight.zeros is not None,
        PER_ROW=num_pairs // len(x), SHARES=shares is not None, BLOCK_M=groups.block_m,
        BLOCK_N=outputs, BLOCK_E=next_power_of_2(num_experts), INNER=weight.inner,
        STAGES=3 if few else 2, num_warps=4,
    )  # fmt: skip
    return out
