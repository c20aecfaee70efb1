"""Fused linear layer for one or two rows: registers hold the weights.

T rows, K inputs, N outputs.

A program computes some outputs from all inputs, without tensor cores. It loads all its weights
while the kernel before it ends: the programs run at the same time, and together hold the whole
matrix. When that kernel has ended, they only have to read the rows. Then the next kernel may begin
to load its weights, so that memory is always being read.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import next_power_of_2
from nanovllm.kernels.triton.common import await_inputs, let_next_begin
from nanovllm.kernels.triton.linear.row_outputs import RowOperands, store_outputs

MOST_ROWS = 2
# Of a matrix: two programs with 64 KiB in registers on each of an H100's 132 multiprocessors.
MOST_BYTES = 2 * 132 << 16
WARPS = 4
HELD = WARPS * 32 * 128  # weights of a program: 128 of a thread, in 64 registers
MOST_TILE_ROWS = 16
TILE = 16  # outputs of a program of `held_tiles`, which has at most 4 times as many warps
TILE_INPUTS = 16 * 64  # 64 for each of its warps: two loads of 16 bytes by 4 threads
MOST_SHARED_ROWS = 32  # the most rows for `shared_tiles`
SHARED_OUTPUTS = 64  # outputs of a program of `shared_tiles`


@triton.jit(do_not_specialize=["num_rows"])
def _held_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, squares_ptr, bias_ptr, residual_ptr, norm_ptr, out_ptr, product_ptr,
    out_squares_ptr, num_rows, eps,
    N: tl.constexpr, K: tl.constexpr, BLOCK_P: tl.constexpr, P: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of all rows."""
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    t = tl.arange(0, BLOCK_T)
    real = (t < num_rows)[:, None]
    at = t[:, None] * N + n[None, :]
    weight_at = weight_ptr + n[:, None] * K + k[None, :]
    weight = tl.load(weight_at, mask=(k < K)[None, :], other=0.0)
    if GATED:
        up_weight = tl.load(weight_at + N * K, mask=(k < K)[None, :], other=0.0)
    norm = tl.load(norm_ptr + n) if ADD else 0.0
    await_inputs(EARLY)
    let_next_begin(EARLY)
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    squares, residual, up = acc, acc, acc
    if P:
        p = tl.arange(0, BLOCK_P)
        parts = real & (p < P)[None, :]
        squares = tl.load(squares_ptr + t[:, None] * P + p[None, :], mask=parts, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + at, mask=real, other=0.0)
    for row in tl.static_range(BLOCK_T):
        x = tl.load(x_ptr + row * K + k, mask=(k < K) & (row < num_rows), other=0.0)
        x = x.to(tl.float32)[None, :]
        this = (t == row)[:, None]
        acc = tl.where(this, tl.sum(weight.to(tl.float32) * x, axis=1)[None, :], acc)
        if GATED:
            up = tl.where(this, tl.sum(up_weight.to(tl.float32) * x, axis=1)[None, :], up)
    store_outputs(acc, up, squares, bias_ptr, residual, norm, out_ptr, product_ptr,
                  out_squares_ptr, t, n, tl.program_id(1), at, real, num_rows, eps, N, K, P, BIAS,
                  GATED, ADD, BLOCK_N)  # fmt: skip


def can_hold(num_rows: int, weight: torch.Tensor) -> bool:
    """Whether the kernel is faster than `few_rows` for a weight [N, K]."""
    size_in = next_power_of_2(weight.shape[1])
    return num_rows <= MOST_ROWS and weight.nbytes <= MOST_BYTES and 2 * size_in <= HELD


def can_hold_tiles(num_rows: int, weight: torch.Tensor, gated: bool) -> bool:
    """Whether `held_tiles` is faster than `few_rows` for a weight [N, K].

    If `gated`, it is the weight of gate and up.
    """
    size_out, size_in = weight.shape
    return (
        num_rows <= MOST_TILE_ROWS and weight.nbytes <= MOST_BYTES and size_in % TILE_INPUTS == 0
        and size_out % (TILE * (1 + gated)) == 0 and TILE * size_in * (1 + gated) <= 4 * HELD
    )  # fmt: skip


def can_share_tiles(num_rows: int, weight: torch.Tensor) -> bool:
    """Whether `shared_tiles` is faster than `few_rows` for a weight [N, K], or [2 * N, K]."""
    size_out, size_in = weight.shape
    return (
        MOST_TILE_ROWS < num_rows <= MOST_SHARED_ROWS and weight.nbytes <= MOST_BYTES
        and size_in % TILE_INPUTS == 0 and size_out % SHARED_OUTPUTS == 0
    )  # fmt: skip


def launch(rows: RowOperands, weight: torch.Tensor) -> torch.Tensor:
    """Launch the kernel for a weight that `can_hold`. Returns the sums of squares, if any."""
    x, (num_rows, size_out) = rows.x, rows.out.shape
    assert x.is_contiguous() and weight.is_contiguous()
    block_k = next_power_of_2(x.shape[1])
    outputs = min(HELD // block_k // (1 + rows.gated), size_out & -size_out)
    tensors, constants = rows.arguments(size_out // outputs)
    _held_kernel[(1, size_out // outputs)](
        x, weight, *tensors, num_rows, rows.eps, BLOCK_T=next_power_of_2(num_rows),
        BLOCK_N=outputs, BLOCK_K=block_k, num_warps=WARPS, **constants,
    )  # fmt: skip
    return tensors[-1]
