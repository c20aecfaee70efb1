"""Fused linear layer for 17 to 32 rows: shared memory holds the weights for `wgmma`.

T rows, K inputs, N outputs.

As in `held_tiles`, a program loads all its weights while the kernel before it ends, and the
programs that run at the same time hold the whole matrix. After that kernel's end every program
reads the rows; with many programs, this takes as long as reading the weights. So a program has
OUTPUTS rows of the weight, the fewest that four warps multiply together, and INPUTS inputs. If K is
larger, several programs share a tile, and the last one to finish adds up their parts in order. The
tensor memory accelerator copies weights and rows, so that no registers are needed for data in
flight.

Gluon has no interpreter: the kernel's results are tested on a GPU.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanovllm.kernels.integers import next_power_of_2
from nanovllm.kernels.triton.attention.hopper_tiles import MATRIX
from nanovllm.kernels.triton.common import leave_parts, with_room
from nanovllm.kernels.triton.linear.held_tiles import begin, sum_squares
from nanovllm.kernels.triton.linear.held_weights import SHARED_OUTPUTS, TILE_INPUTS
from nanovllm.kernels.triton.linear.row_outputs import RowOperands, store_outputs

OUTPUTS = gl.constexpr(SHARED_OUTPUTS)  # rows of the weight; if gated, half gates and half ups
INPUTS = gl.constexpr(TILE_INPUTS)  # inputs of a program
COPIED = gl.constexpr(256)  # inputs that are copied together
STEPS = gl.constexpr(INPUTS.value // COPIED.value)
WARPS = gl.constexpr(4)


@gluon.jit
def _barriers(num_bytes: gl.constexpr):  # type: ignore[no-untyped-def]
    """Make a barrier for each of STEPS copies of `num_bytes` bytes."""
    bars = gl.allocate_shared_memory(gl.int64, [STEPS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STEPS):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()  # the accelerator signals these barriers
    for i in gl.static_range(STEPS):
        mbarrier.expect(bars.index(i), num_bytes)
    return bars


@gluon.jit
def _sum_parts(acc, parts_ptr, arrivals_ptr, SPLIT: gl.constexpr, BLOCK_T: gl.constexpr):  # type: ignore[no-untyped-def]
    """Store this program's part of a tile. Return whether it is the last one, and then the sum."""
    layout: gl.constexpr = acc.type.layout
    row = gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout))
    t = gl.arange(0, BLOCK_T, gl.SliceLayout(0, layout))
    size: gl.constexpr = OUTPUTS * BLOCK_T
    tile = gl.program_id(1)
    at = row[:, None] * BLOCK_T + t[None, :]
    parts_ptr += tile * SPLIT * size
    last = leave_parts(
        acc, acc, parts_ptr, arrivals_ptr, tile, gl.program_id(0), size, at, None, SPLIT, False
    )
    if last:
        gl.store(arrivals_ptr + tile, 0)  # reset for the next call
        acc = gl.load(parts_ptr + at, cache_modifier=".cg")
        for part in gl.static_range(1, SPLIT):
            acc += gl.load(parts_ptr + part * size + at, cache_modifier=".cg")
    return last, acc


@gluon.jit(do_not_specialize=["num_rows"])
def _shared_tiles_kernel(  # type: ignore[no-untyped-def]
    x_tiles, weight_tiles, squares_ptr, bias_ptr, residual_ptr, norm_ptr, out_ptr, product_ptr,
    out_squares_ptr, parts_ptr, arrivals_ptr, num_rows, eps,
    N: gl.constexpr, K: gl.constexpr, BLOCK_P: gl.constexpr, P: gl.constexpr, BIAS: gl.constexpr,
    GATED: gl.constexpr, ADD: gl.constexpr, BLOCK_T: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Compute a tile of outputs of all rows, or a part of its sums."""
    TENSORS: gl.constexpr = 2 if GATED else 1  # noqa: N806
    BLOCK_N: gl.constexpr = OUTPUTS // TENSORS  # noqa: N806
    SPLIT: gl.constexpr = K // INPUTS  # noqa: N806
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_T, 16])  # noqa: N806
    OUT: gl.constexpr = gl.BlockedLayout(  # noqa: N806
        [1, 4], [128 // BLOCK_N, BLOCK_N // 4], [WARPS, 1], [1, 0]
    )
    dtype: gl.constexpr = x_tiles.dtype
    first_k = gl.program_id(0) * INPUTS
    first_n = gl.program_id(1) * BLOCK_N
    weights = gl.allocate_shared_memory(
        dtype, [STEPS, TENSORS, BLOCK_N, COPIED], weight_tiles.layout
    )
    rows = gl.allocate_shared_memory(dtype, [STEPS, BLOCK_T, COPIED], x_tiles.layout)
    bars = _barriers(OUTPUTS * COPIED * 2)
    rows_bars = _barriers(BLOCK_T * COPIED * 2)
    for i in gl.static_range(STEPS):
        tma.async_copy_global_to_shared(
            weight_tiles, [0, first_n, first_k + i * COPIED], bars.index(i), weights.index(i)
        )
    t = gl.arange(0, BLOCK_T, gl.SliceLayout(1, OUT))
    n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, OUT))
    at = t[:, None] * N + n[None, :]
    real = (t < num_rows)[:, None] & (n < N)[None, :]
    norm, residual, squares = at, at, at
    if ADD:
        norm = gl.load(norm_ptr + n)
    begin(EARLY)
    for i in gl.static_range(STEPS):
        tma.async_copy_global_to_shared(
            x_tiles, [0, first_k + i * COPIED], rows_bars.index(i), rows.index(i)
        )
    if P:
        squares = sum_squares(squares_ptr, num_rows, BLOCK_T, BLOCK_P, P, WARPS, OUT)
    if ADD:
        residual = gl.load(residual_ptr + at, mask=real, other=0.0)
    acc = gl.zeros([OUTPUTS, BLOCK_T], gl.float32, MMA)
    for i in gl.static_range(STEPS):
        mbarrier.wait(bars.index(i), 0)
        mbarrier.wait(rows_bars.index(i), 0)
        weight = weights.index(i)._reinterpret(dtype, [OUTPUTS, COPIED], MATRIX)
        acc = warpgroup_mma(weight, rows.index(i).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    if SPLIT > 1:
        last, acc = _sum_parts(acc, parts_ptr, arrivals_ptr, SPLIT, BLOCK_T)
        if not last:
            return
    acc = gl.permute(acc, (1, 0))
    up = acc
    if GATED:
        PAIRS: gl.constexpr = gl.BlockedLayout(  # noqa: N806
            [1, 4, 2], [128 // BLOCK_N, BLOCK_N // 4, 1], [WARPS, 1, 1], [2, 1, 0]
        )
        pairs = gl.permute(gl.reshape(acc, [BLOCK_T, 2, BLOCK_N]), (0, 2, 1))
        acc, up = gl.split(gl.convert_layout(pairs, PAIRS))
        up = gl.convert_layout(up, OUT)
    acc = gl.convert_layout(acc, OUT)
    store_outputs(acc, up if GATED else acc, squares, bias_ptr, residual, norm, out_ptr,
                  product_ptr, out_squares_ptr, t, n, gl.program_id(1), at, real, num_rows, eps,
                  N, K, P, BIAS, GATED, ADD, BLOCK_N)  # fmt: skip


def launch(rows: RowOperands, weight: torch.Tensor, arrivals: torch.Tensor) -> torch.Tensor:
    """Launch the kernel for a weight that `can_share_tiles`. Returns the sums of squares, if any.

    `arrivals` are zeros, one for each tile of outputs.
    """
    x, gated, (num_rows, size_out), size_in = rows.x, rows.gated, rows.out.shape, rows.x.shape[1]
    assert x.is_contiguous() and weight.is_contiguous()
    block_t, block_n = max(8, next_power_of_2(num_rows)), OUTPUTS.value // (1 + gated)
    tiles, splits = size_out // block_n, size_in // INPUTS.value
    assert splits == 1 or tiles <= len(arrivals)
    tensors, constants = rows.arguments(tiles)
    parts = squares = tensors[-1]
    if splits > 1:
        parts = x.new_empty(tiles, splits, OUTPUTS.value, block_t, dtype=torch.float32)
    _shared_tiles_kernel[(splits, tiles)](
        _described(with_room(x, block_t), [block_t, COPIED.value]),
        _described(weight.view(1 + gated, size_out, size_in), [1 + gated, block_n, COPIED.value]),
        *tensors, parts, arrivals, num_rows, rows.eps,
        BLOCK_T=block_t, num_warps=WARPS.value, **constants,
    )  # fmt: skip
    return squares


def _described(x: torch.Tensor, box: list[int]) -> TensorDescriptor:
    """Describe a tensor to the accelerator, which copies boxes of it."""
    layout = gl.NVMMASharedLayout(128, 16, len(box))
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)
