"""Multiply rows by `BlockPlanes`, fused with the operations around the layer.

T rows, K inputs, N outputs. A program takes the codes of a tile of outputs, run after run of
inputs, converts them in registers, and multiplies them by the tensor cores. A weight is rounded
once, to the type of x; sums are float32. If there are too few tiles to keep the memory busy,
several programs share a tile, each with a part of K, and the last one to finish adds up the parts
in their order.

Order of sums: run after run within a part, then the parts. For up to SAME_ROWS rows the parts
depend on the weight and the GPU only. For more rows, a program can add up the same parts alone.
"""

import functools

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.triton.common import (
    await_inputs,
    can_copy_tiles,
    dot,
    leave_parts,
    let_next_begin,
    num_multiprocessors,
    sum_parts,
)
from nanovllm.kernels.triton.linear.block_planes import (
    LEAST_OUTPUTS,
    MOST_ROW_TILES,
    RUN,
    BlockPlanes,
)
from nanovllm.kernels.triton.linear.block_values import lanes, load_values
from nanovllm.kernels.triton.linear.row_outputs import RowOperands, store_outputs
from nanovllm.kernels.triton.linear.row_tiles import RowTiles

SAME_ROWS = 64
MOST_SPLITS, LEAST_RUNS = 8, 2  # the most parts of K, and the fewest runs of each


@triton.jit
def _load_x(  # type: ignore[no-untyped-def]
    x_ptr, t, k, num_rows, K: tl.constexpr, RUN: tl.constexpr
):  # fmt: skip
    inside = (t < num_rows)[:, None]
    if K % RUN:
        inside &= (k < K)[None, :]
    return tl.load(x_ptr + t[:, None] * K + k[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def _block_products_kernel(  # type: ignore[no-untyped-def]
    x_ptr, low_ptr, high_ptr, scales_ptr, mins_ptr, supers_ptr,
    squares_ptr, bias_ptr, residual_ptr, norm_ptr, out_ptr, product_ptr, out_squares_ptr, parts_ptr,
    arrivals_ptr, num_rows, eps,
    N: tl.constexpr, K: tl.constexpr, RUN: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, CENTER: tl.constexpr, NUMBERS: tl.constexpr,
    GROUPS: tl.constexpr, SCALES: tl.constexpr, SCALE_CENTER: tl.constexpr, MINS: tl.constexpr,
    WEIGHT_N: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a part of K for one tile of outputs. Neighbouring programs use the same codes.

    Without SPLIT, a program adds up PARTS parts, each from zero on.
    """
    first_t = tl.program_id(0) * BLOCK_T
    first_n = tl.program_id(1) * BLOCK_N
    t = first_t + tl.arange(0, BLOCK_T)
    n = first_n + tl.arange(0, BLOCK_N)
    real = (t < num_rows)[:, None] & (n < N)[None, :]
    at = t[:, None] * N + n[None, :]
    inside_n = tl.minimum(n, N - 1) if N % BLOCK_N else n
    lane_n, other_n = lanes(first_n, N, BLOCK_N)
    await_inputs(EARLY)
    # Loads for the end of the kernel start before those of the codes, which take longest.
    if P:
        p = tl.arange(0, BLOCK_P)
        counted = (t < num_rows)[:, None] & (p < P)[None, :]
        squares = tl.load(squares_ptr + t[:, None] * P + p[None, :], mask=counted, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + at, mask=real, other=0.0)
        norm = tl.load(norm_ptr + inside_n)
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = acc
    RUNS: tl.constexpr = (K + RUN - 1) // RUN  # noqa: N806
    SHARE: tl.constexpr = (RUNS + SPLIT * PARTS - 1) // (SPLIT * PARTS)  # noqa: N806
    split = tl.program_id(2)
    end = tl.minimum((split + 1) * SHARE, RUNS) if PARTS == 1 else RUNS
    total = acc
    for run in tl.range(split * SHARE, end, num_stages=STAGES):
        x = _load_x(x_ptr, t, run * RUN + tl.arange(0, RUN), num_rows, K, RUN)
        values = load_values(low_ptr, high_ptr, scales_ptr, mins_ptr, supers_ptr, lane_n, other_n,
                             run, LOW, HIGH, CENTER, NUMBERS, GROUPS, SCALES, SCALE_CENTER, MINS,
                             WEIGHT_N)  # fmt: skip
        acc = dot(values.to(x.dtype), tl.trans(x), acc)
        if GATED:
            values = load_values(low_ptr, high_ptr, scales_ptr, mins_ptr, supers_ptr, N + lane_n,
                                 N + other_n, run, LOW, HIGH, CENTER, NUMBERS, GROUPS, SCALES,
                                 SCALE_CENTER, MINS, WEIGHT_N)  # fmt: skip
            up = dot(values.to(x.dtype), tl.trans(x), up)
        if PARTS > 1:  # noqa: SIM102
            if ((run + 1) % SHARE == 0) | (run + 1 == RUNS):
                total += acc
                acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    if PARTS > 1:
        acc = total
    acc = tl.trans(acc)
    up = tl.trans(up)
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    size = num_rows * N
    finishes = leave_parts(acc, up, parts_ptr, arrivals_ptr, tile, split, size, at, real,
                           SPLIT, GATED)  # fmt: skip
    let_next_begin(EARLY)
    if finishes:
        acc, up = sum_parts(acc, up, parts_ptr, arrivals_ptr, tile, size, at, real, SPLIT, GATED,
                            BLOCK_T <= 64)  # fmt: skip
        store_outputs(acc, up, squares if P else acc, bias_ptr, residual if ADD else acc,
                      norm if ADD else acc, out_ptr, product_ptr, out_squares_ptr, t, inside_n,
                      tl.program_id(1), at, real, num_rows, eps, N, K, P, BIAS, GATED, ADD,
                      BLOCK_N)  # fmt: skip


def choose_block_tiles(num_rows: int, weight: BlockPlanes, gated: bool = False) -> RowTiles:
    """Choose the tiles of a product by its shape."""
    size_out, processors = weight.shape[0] // (1 + gated), num_multiprocessors(weight.device)
    large = can_copy_tiles(weight.device)  # other GPUs have no registers for the sums
    stages = 3 if weight.parts.bits < 6 else 2  # that fit a processor's shared memory
    return _tiles(num_rows, size_out, weight.runs, processors, large, stages)


@functools.cache
def _tiles(
    num_rows: int, size_out: int, runs: int, processors: int, large: bool, stages: int
) -> RowTiles:
    """Choose tiles so that a processor runs about two at the same time, or one large one.

    Programs read the rows for each tile of outputs, so many rows need large tiles.
    """
    if num_rows > SAME_ROWS and large:
        if 4 * cdiv(size_out, 128) >= 3 * processors:
            if num_rows > 128:
                return RowTiles(256, 128, 1, stages, 8)
            return RowTiles(128, 128, 1, 3, 8)
        is_few = cdiv(size_out, 64) < processors and runs >= 2 * LEAST_RUNS
        return RowTiles(128, 64, 2 if is_few else 1, 3)
    rows = next(size for size in (16, 32, 64) if num_rows <= size or size == 64)
    splits, most_splits = 1, MOST_SPLITS if num_rows <= SAME_ROWS else 1
    while splits < most_splits and 2 * cdiv(size_out, 64) * splits < 3 * processors:
        if runs < 2 * splits * LEAST_RUNS:
            break
        splits *= 2
    return RowTiles(rows, 64, splits, 4)


def launch(rows: RowOperands, weight: BlockPlanes, tiles: RowTiles | None = None) -> torch.Tensor:
    """Launch the kernel. Returns the sums of squares, if there are addends."""
    x, (num_rows, size_out) = rows.x, rows.out.shape
    assert x.is_contiguous() and rows.out.is_contiguous()
    tiles = tiles or choose_block_tiles(num_rows, weight, rows.gated)
    columns = cdiv(size_out, tiles.outputs)
    assert tiles.outputs >= LEAST_OUTPUTS
    assert tiles.parts == 1 or (tiles.splits == 1 and not rows.gated)
    assert tiles.splits == 1 or cdiv(num_rows, tiles.rows) <= MOST_ROW_TILES
    tensors, constants = rows.arguments(columns)
    parts = squares = tensors[-1]
    if tiles.splits > 1:
        parts = x.new_empty(tiles.splits, 1 + rows.gated, num_rows, size_out, dtype=torch.float32)
    _block_products_kernel[(cdiv(num_rows, tiles.rows), columns, tiles.splits)](
        x, *weight.tensors, *tensors, parts, weight.arrivals, num_rows, rows.eps,
        RUN=RUN, SPLIT=tiles.splits, PARTS=tiles.parts, BLOCK_T=tiles.rows, BLOCK_N=tiles.outputs,
        STAGES=tiles.stages, num_warps=tiles.warps, **weight.constants, **constants,
    )  # fmt: skip
    return squares
