"""Add adapters to a layer's output: two products, grouped by the adapters of the rows.

Rows are sorted by group once for a step (`group_rows`) and divided into tiles of one group, so that
the matrices of a group are read once for each tile. Nothing syncs, and all shapes depend only on
those of the arguments, so CUDA graphs can contain the kernels. Sizes are named as in
`plain/lora.py`.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.operands.low_rank import LowRank
from nanovllm.kernels.operands.scaled import Scaled
from nanovllm.kernels.triton.common import await_inputs, dot, early, let_next_begin
from nanovllm.kernels.triton.experts.grouping import find_tile
from nanovllm.kernels.triton.lora.row_groups import RowGroups

BLOCK_R = 16  # ranks of a tile: the fewest that tensor cores multiply
MOST_PROJECTIONS = 3
FEW = 32  # rows
# The number of parts of the inputs, by the most rows: enough programs to read A at full speed, but
# few sums. There are few values because each one needs its own binary.
PARTS = {512: 8, 2048: 4}
LEAST_PART = 1024  # inputs of a part: with fewer, more programs add up more parts


@triton.jit
def multiply_down(  # type: ignore[no-untyped-def]
    x_ptr, a_ptr, ranks_ptr, down_ptr, order_ptr, bounds_ptr, tile_ends_ptr,
    num_groups, num_rows, size_in, x_stride, part_size, block, tile, part,
    PER_ROW: tl.constexpr, PROJECTIONS: tl.constexpr, MAX_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr, ONE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The products of a tile's rows with BLOCK_R rows of A, in a part of the inputs.

    ONE: the part is a single tile of A, which is read before the inputs are ready. Groups and ranks
    are then also read early: the kernel before this one must not be that of `group_rows`.
    """
    width: tl.constexpr = PROJECTIONS * MAX_RANK
    group, place, real = find_tile(
        tile, bounds_ptr, tile_ends_ptr, num_groups + 1, BLOCK_M, BLOCK_E
    )
    of_group = group.to(tl.int64)
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    ranks_at = ranks_ptr + of_group * PROJECTIONS + r // MAX_RANK
    rank = tl.load(ranks_at, mask=(group < num_groups) & (r < width), other=0)
    wanted = r % MAX_RANK < rank
    start = part * part_size
    stop = tl.minimum(start + part_size, size_in)
    k = start + tl.arange(0, BLOCK_K)
    a_at = a_ptr + (of_group * width + r)[None, :] * size_in + k[:, None]
    a = tl.zeros((BLOCK_K, BLOCK_R), dtype=a_ptr.dtype.element_ty)
    if ONE:
        a = tl.load(a_at, mask=wanted[None, :] & (k < stop)[:, None], other=0.0)
    await_inputs(EARLY)
    if tl.max(wanted.to(tl.int32), axis=0) > 0:
        pair = tl.load(order_ptr + place, mask=real, other=0).to(tl.int64)
        x_at = x_ptr + (pair // PER_ROW)[:, None] * x_stride + k[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        if ONE:
            x = tl.load(x_at, mask=real[:, None] & (k < stop)[None, :], other=0.0)
            acc = dot(x, a)
        else:
            for at in tl.range(0, stop - start, BLOCK_K, num_stages=STAGES):
                left = k < stop - at
                x = tl.load(x_at + at, mask=real[:, None] & left[None, :], other=0.0)
                a = tl.load(a_at + at, mask=wanted[None, :] & left[:, None], other=0.0)
                acc = dot(x, a, acc)
        row = part * num_rows + pair
        down_at = down_ptr + row[:, None] * width + r[None, :]
        tl.store(down_at, acc, mask=real[:, None] & wanted[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _down_kernel(  # type: ignore[no-untyped-def]
    x_ptr, a_ptr, ranks_ptr, down_ptr, order_ptr, bounds_ptr, tile_ends_ptr,
    num_groups, num_rows, size_in, x_stride, part_size,
    PER_ROW: tl.constexpr, PROJECTIONS: tl.constexpr, MAX_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr, ONE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_R rows of A, for a tile's rows and a part of the inputs."""
    multiply_down(
        x_ptr, a_ptr, ranks_ptr, down_ptr, order_ptr, bounds_ptr, tile_ends_ptr,
        num_groups, num_rows, size_in, x_stride, part_size,
        tl.program_id(0), tl.program_id(1), tl.program_id(2),
        PER_ROW, PROJECTIONS, MAX_RANK, BLOCK_M, BLOCK_R, BLOCK_K, BLOCK_E, STAGES, ONE, EARLY,
    )  # fmt: skip
    let_next_begin(EARLY)


@triton.jit
def _sum_down(  # type: ignore[no-untyped-def]
    down_at, num_rows, width, mask, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """The sum of a tile's parts, in their order."""
    total = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(down_at + part * num_rows.to(tl.int64) * width, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _up_kernel(  # type: ignore[no-untyped-def]
    down_ptr, b_ptr, ranks_ptr, out_ptr, shares_ptr, squares_ptr, order_ptr, bounds_ptr,
    tile_ends_ptr, num_groups, num_rows, size_out, size0, size1, out_stride, size_in, eps,
    PARTS: tl.constexpr, PROJECTIONS: tl.constexpr, MAX_RANK: tl.constexpr, SHARES: tl.constexpr,
    SET: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program adds to BLOCK_N outputs of one projection, for a tile's rows.

    SET: it sets them instead, also those of rows without an adapter. P: the inputs lack their
    norm's factor, which is computed from P parts of their sums of squares.
    """
    group, place, real = find_tile(
        tl.program_id(1), bounds_ptr, tile_ends_ptr, num_groups + 1, BLOCK_M, BLOCK_E
    )
    # Each projection has its own tiles.
    tile = tl.program_id(0)
    blocks0, blocks1 = tl.cdiv(size0, BLOCK_N), tl.cdiv(size1, BLOCK_N)
    projection = (tile >= blocks0).to(tl.int32) + (tile >= blocks0 + blocks1).to(tl.int32)
    first = tl.where(projection == 0, 0, tl.where(projection == 1, size0, size0 + size1))
    end = tl.where(projection == 0, size0, tl.where(projection == 1, size0 + size1, size_out))
    tile -= tl.where(projection == 0, 0, tl.where(projection == 1, blocks0, blocks0 + blocks1))
    n = first + tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < end
    of_group = group.to(tl.int64)
    rank = tl.load(
        ranks_ptr + of_group * PROJECTIONS + projection, mask=group < num_groups, other=0
    )
    r = tl.arange(0, BLOCK_R)
    b_at = b_ptr + (of_group * MAX_RANK + r)[:, None] * size_out + n[None, :]
    b = tl.load(b_at, mask=(r < rank)[:, None] & inside[None, :], other=0.0)
    await_inputs(EARLY)
    pair = tl.load(order_ptr + place, mask=real, other=0).to(tl.int64)
    out_at = out_ptr + pair[:, None] * out_stride + n[None, :]
    mask = real[:, None] & inside[None, :]
    if rank > 0:
        width: tl.constexpr = PROJECTIONS * MAX_RANK
        down_at = down_ptr + pair[:, None] * width + projection * MAX_RANK + r[None, :]
        there = real[:, None] & (r < rank)[None, :]
        down = _sum_down(down_at, num_rows, width, there, BLOCK_M, BLOCK_R, PARTS)
        acc = dot(down.to(b.dtype), b)
        for at in range(BLOCK_R, rank, BLOCK_R):
            there = real[:, None] & (r < rank - at)[None, :]
            down = _sum_down(down_at + at, num_rows, width, there, BLOCK_M, BLOCK_R, PARTS)
            b = tl.load(
                b_at + at * size_out, mask=(r < rank - at)[:, None] & inside[None, :], other=0.0
            )
            acc = dot(down.to(b.dtype), b, acc)
        if SHARES:
            acc *= tl.load(shares_ptr + pair, mask=real, other=0.0)[:, None]
        if P:
            p = tl.arange(0, BLOCK_P)
            squares_at = squares_ptr + pair[:, None] * P + p[None, :]
            parts = tl.load(squares_at, mask=real[:, None] & (p < P)[None, :], other=0.0)
            acc *= tl.rsqrt(tl.sum(parts, axis=1) / size_in + eps)[:, None]
        if not SET:
            acc += tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)
    elif SET:
        zeros = tl.zeros((BLOCK_M, BLOCK_N), dtype=out_ptr.dtype.element_ty)
        tl.store(out_at, zeros, mask=mask)
    let_next_begin(EARLY)


def num_parts(num_rows: int, size_in: int) -> int:
    """The number of parts into which programs divide the inputs."""
    most = next((parts for rows, parts in PARTS.items() if num_rows <= rows), 1)
    return max(1, min(most, size_in // LEAST_PART))


def lora_down(x: torch.Tensor, weights: LowRank, groups: RowGroups) -> torch.Tensor:
    """`x @ A.T` for rows with an adapter, in float32, in parts that `lora_up` adds up.

    Bytes moved: A up to the group's rank, once for each tile of the group's rows.
    """
    return down_in_parts(num_parts(groups.num_rows, x.shape[1]), x, weights, groups)


def down_in_parts(parts: int, x: torch.Tensor, weights: LowRank, groups: RowGroups) -> torch.Tensor:
    """`lora_down` with this number of parts."""
    sorted_rows, num_rows = groups.groups, groups.num_rows
    size_in, projections = x.shape[1], weights.ranks.shape[1]
    assert x.stride(1) == 1 and weights.a.is_contiguous() and weights.a.shape[2] == size_in
    assert len(weights.a) == groups.num_groups
    down = x.new_empty(parts, num_rows, weights.a.shape[1], dtype=torch.float32)
    if not num_rows:
        return down
    block_m = sorted_rows.block_m
    most_k = (256 if block_m == 16 else 128) // (1 if x.itemsize == 2 else 4)
    part_size = cdiv(cdiv(size_in, parts), 16) * 16
    block_k = max(16, min(most_k, next_power_of_2(part_size)))
    grid = cdiv(weights.a.shape[1], BLOCK_R), sorted_rows.num_tiles, parts
    _down_kernel[grid](
        x, weights.a, weights.ranks, down, sorted_rows.order, sorted_rows.bounds,
        sorted_rows.tile_ends, groups.num_groups, num_rows, size_in, x.stride(0), part_size,
        PER_ROW=num_rows // len(x), PROJECTIONS=projections, MAX_RANK=weights.max_rank,
        BLOCK_M=block_m, BLOCK_R=BLOCK_R, BLOCK_K=block_k, BLOCK_E=groups.block_e, STAGES=3,
        ONE=part_size <= block_k, num_warps=4, **early(x.device),
    )  # fmt: skip
    return down


def lora_up(
    down: torch.Tensor,
    weights: LowRank,
    groups: RowGroups,
    out: torch.Tensor,
    shares: torch.Tensor | None = None,
) -> None:
    """Add `down @ B.T` to the rows of `out` with an adapter, times `shares` if given."""
    launch_up(down, weights, groups, out, shares)


def lora_bias(x: Scaled, weights: LowRank, groups: RowGroups) -> torch.Tensor:
    """The adapters' outputs for rows with an unfinished norm: [T, N], zeros without an adapter."""
    down = lora_down(x.product, weights, groups)
    out = x.product.new_empty(groups.num_rows, weights.b.shape[2])
    launch_up(down, weights, groups, out, scaled=x, sets=True)
    return out


def launch_up(
    down: torch.Tensor,
    weights: LowRank,
    groups: RowGroups,
    out: torch.Tensor,
    shares: torch.Tensor | None = None,
    scaled: Scaled | None = None,
    sets: bool = False,
    may_fuse: bool = True,
) -> None:
    """`lora_up`, also for rows `scaled` that lack their norm's factor.

    Unless it `may_fuse`, no product is added without being rounded.
    If `sets`, outputs are set, to zeros for rows without an adapter. Bytes moved: the rows of
    `out`, read and written, and B once for each tile of a group's rows.
    """
    _, sorted_rows, num_rows, num_groups = groups
    size_out, projections = weights.b.shape[2], weights.ranks.shape[1]
    assert out.shape == (num_rows, size_out) and out.stride(1) == 1 and down.is_contiguous()
    assert weights.b.is_contiguous() and len(weights.b) == num_groups
    assert projections == len(weights.sizes) <= MOST_PROJECTIONS
    if not num_rows:
        return
    block_n = 64 if num_rows <= FEW and size_out <= 1 << 13 else 128
    size0, size1, _ = (*weights.sizes, 0, 0)[:3]
    squares, eps = (out, 0.0) if scaled is None else (scaled.squares, scaled.eps)
    width = 0 if scaled is None else squares.shape[1]
    grid = sum(cdiv(size, block_n) for size in weights.sizes), sorted_rows.num_tiles
    options = {} if may_fuse else {"enable_fp_fusion": False}
    _up_kernel[grid](
        down, weights.b, weights.ranks, out, out if shares is None else shares, squares,
        sorted_rows.order, sorted_rows.bounds, sorted_rows.tile_ends, num_groups, num_rows,
        size_out, size0, size1, out.stride(0), weights.a.shape[2], eps,
        PARTS=len(down), PROJECTIONS=projections, MAX_RANK=weights.max_rank,
        SHARES=shares is not None, SET=sets, P=width, BLOCK_P=next_power_of_2(max(1, width)),
        BLOCK_M=sorted_rows.block_m, BLOCK_R=BLOCK_R, BLOCK_N=block_n, BLOCK_E=groups.block_e,
        num_warps=4, num_stages=1, **early(out.device), **options,
    )  # fmt: skip
