"""Products of heads that have a matrix each, with the order of sums of `linear`.

T rows, H heads, K inputs, N outputs.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.triton.common import (
    await_inputs,
    dot,
    early,
    let_next_begin,
    num_multiprocessors,
)

LEAST = 16  # the sizes that tensor cores multiply are multiples of this
MOST_ROWS, MOST_OUTPUTS, INPUTS = 128, 128, 64  # of a tile


@triton.jit(do_not_specialize=["num_rows"])
def _heads_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weights_ptr, out_ptr, num_rows, x_row_stride, x_head_stride, out_row_stride,
    out_head_stride, N: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one tile of a head's outputs. Neighbouring programs read the same weights."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2).to(tl.int64)
    x_at = x_ptr + head * x_head_stride + t.to(tl.int64)[:, None] * x_row_stride
    weights_at = weights_ptr + head * (K * N) + n[None, :]
    await_inputs(EARLY)
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_at + k[None, :], mask=(t < num_rows)[:, None] & (k < K)[None, :], other=0.0)
        real = (k < K)[:, None] & (n < N)[None, :]
        weights = tl.load(weights_at + k[:, None] * N, mask=real, other=0.0)
        acc = dot(x, weights, acc)
    let_next_begin(EARLY)
    out_at = out_ptr + head * out_head_stride + t.to(tl.int64)[:, None] * out_row_stride
    real = (t < num_rows)[:, None] & (n < N)[None, :]
    tl.store(out_at + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=real)


def heads_linear(
    x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As the plain definition. x and `out` may be strided, except in their last dimension.

    A tile has as many rows as there are, up to MOST_ROWS, and as few outputs as it takes for all
    multiprocessors to have one. Its size does not change the order of sums.
    """
    (num_rows, num_heads, size_in), size_out = x.shape, weights.shape[2]
    if out is None:
        out = x.new_empty(num_rows, num_heads, size_out)
    if not num_rows:
        return out
    assert weights.is_contiguous() and x.stride(2) == out.stride(2) == 1
    wide = x.dtype.itemsize == 2  # on tensor cores
    block_t = min(MOST_ROWS if wide else 32, max(LEAST, next_power_of_2(num_rows)))
    block_n = min(MOST_OUTPUTS if wide else 32, max(LEAST, next_power_of_2(size_out)))
    processors, tiles = num_multiprocessors(x.device), cdiv(num_rows, block_t) * num_heads
    while block_n > 2 * LEAST and tiles * cdiv(size_out, block_n) < processors:
        block_n //= 2
    block_k = min(INPUTS, max(LEAST, next_power_of_2(size_in)))
    _heads_kernel[(cdiv(num_rows, block_t), cdiv(size_out, block_n), num_heads)](
        x, weights, out, num_rows, x.stride(0), x.stride(1), out.stride(0), out.stride(1),
        N=size_out, K=size_in, BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=8 if block_t * block_n == MOST_ROWS * MOST_OUTPUTS else 4, num_stages=3,
        **early(x.device),
    )  # fmt: skip
    return out
