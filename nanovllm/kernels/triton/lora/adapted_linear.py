"""A linear layer for few rows and the adapters of these rows, in one kernel.

T rows, K inputs, N outputs. Sizes of adapters are named as in `LowRank`.

In separate kernels, the two products with an adapter would take longer to start and to end than to
compute. So the first programs of the layer's kernel compute the rows' products with A. The other
programs multiply tiles of the weight, which takes longer, wait for the first programs, and add the
products with B. All programs must run at the same time, so the work is not divided into more.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.operands.low_rank import LowRank
from nanovllm.kernels.triton.common import (
    await_inputs,
    dot,
    let_next_begin,
    num_multiprocessors,
    tiles_of,
    with_room,
)
from nanovllm.kernels.triton.linear.few_rows import multiply_tiles
from nanovllm.kernels.triton.linear.few_rows_tiles import FewRowsTiles, tiles_for
from nanovllm.kernels.triton.linear.row_outputs import RowOperands, store_outputs
from nanovllm.kernels.triton.lora.lora import MOST_PROJECTIONS, multiply_down
from nanovllm.kernels.triton.lora.row_groups import RowGroups

BLOCK_DOWN = 16  # ranks of a program that multiplies with A
PARTS = 4  # parts of the inputs, for different programs; each output adds them up
MOST_INPUTS = 1024  # the most inputs that are multiplied with A at a time
MOST_RANKS, MOST_UP = 32, 64  # ranks multiplied with B at a time: of a group, of several groups
MOST_ROWS_UP, MOST_OUTPUTS_UP = 1 << 10, 1 << 13  # times rows and outputs, for registers
LEAST_RANKS = 16  # the fewest ranks of a group that tensor cores multiply
SPARE = 16  # processors that tiles of the weight leave free for the products with A
MOST_TOGETHER = 16  # the most rows of a group: their inputs are in registers
MOST_STEPS = 2  # steps to add all products with B; each takes 2 us while others read weights


@triton.jit
def _number_groups(bounds_ptr, num_groups, BLOCK_E: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number the groups that have rows; -1 for others."""
    e = tl.arange(0, BLOCK_E)
    start = tl.load(bounds_ptr + e, mask=e < num_groups, other=0)
    stop = tl.load(bounds_ptr + e + 1, mask=e < num_groups, other=0)
    has_rows = stop > start
    return tl.where(has_rows, tl.cumsum(has_rows.to(tl.int32), axis=0) - 1, -1)


@triton.jit
def _count_steps(  # type: ignore[no-untyped-def]
    numbers, ranks_ptr, projection, PROJECTIONS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The number of steps of BLOCK_R ranks for one group with rows, and for all such groups."""
    together: tl.constexpr = BLOCK_J // BLOCK_R
    ranks_at = ranks_ptr + tl.arange(0, BLOCK_E) * PROJECTIONS + projection
    most = tl.max(tl.load(ranks_at, mask=numbers >= 0, other=0), axis=0)
    steps = (most + BLOCK_R - 1) // BLOCK_R
    return steps, (tl.max(numbers, axis=0) + together) // together * steps


@triton.jit
def _find_ranks(  # type: ignore[no-untyped-def]
    ranks_ptr, numbers, first, first_rank, projection,
    PROJECTIONS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """BLOCK_R ranks for each of the groups from number `first` on, and these groups.

    Ranks beyond a group's rank are -1.
    """
    j, e = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_E)
    number = first + j // BLOCK_R
    group = tl.max(tl.where(numbers[None, :] == number[:, None], e[None, :], -1), axis=1)
    rank = first_rank + j % BLOCK_R
    ranks = tl.load(ranks_ptr + group * PROJECTIONS + projection, mask=group >= 0, other=0)
    return group, tl.where(rank < ranks, rank, -1)


@triton.jit
def _load_up(b_ptr, group, rank, n, size_out, MAX_RANK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the rows of B for these ranks, in the columns n."""
    row = group.to(tl.int64) * MAX_RANK + rank
    mask = (rank >= 0)[:, None]
    return tl.load(b_ptr + row[:, None] * size_out + n[None, :], mask=mask, other=0.0)


@triton.jit
def _add_up(  # type: ignore[no-untyped-def]
    acc, b, group, rank, down_ptr, ids, t, num_rows, projection,
    PROJECTIONS: tl.constexpr, MAX_RANK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add the products with B to each row, from its own group only."""
    width: tl.constexpr = PROJECTIONS * MAX_RANK
    wanted = (rank >= 0)[None, :] & (ids[:, None] == group[None, :])
    at = down_ptr + t[:, None] * width + (projection * MAX_RANK + rank)[None, :]
    down = tl.load(at, mask=wanted, other=0.0, cache_modifier=".cg")
    for part in tl.static_range(1, PARTS):
        part_at = at + part * num_rows.to(tl.int64) * width
        down += tl.load(part_at, mask=wanted, other=0.0, cache_modifier=".cg")
    return acc + dot(down.to(b.dtype), b)


@triton.jit(do_not_specialize=["num_rows"])
def _adapted_kernel(  # type: ignore[no-untyped-def]
    x_tiles, weight_tiles, x_ptr, a_ptr, b_ptr, ranks_ptr, down_ptr, ids_ptr, order_ptr, bounds_ptr,
    tile_ends_ptr, arrivals_ptr, squares_ptr, bias_ptr, residual_ptr, norm_ptr, out_ptr,
    product_ptr, out_squares_ptr, num_rows, num_groups, x_stride, size0, size1, eps,
    num_downs, down_tiles, part_size,
    N: tl.constexpr, K: tl.constexpr, BLOCK_P: tl.constexpr, P: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PROJECTIONS: tl.constexpr, MAX_RANK: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_DOWN: tl.constexpr, DOWN_INPUTS: tl.constexpr, ONE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_E: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The first `num_downs` programs multiply with A, each other one multiplies a weight's tile."""
    program = tl.program_id(0)
    if program < num_downs:
        blocks: tl.constexpr = (PROJECTIONS * MAX_RANK + BLOCK_DOWN - 1) // BLOCK_DOWN
        for unit in range(program, blocks * down_tiles * PARTS, num_downs):
            multiply_down(
                x_ptr, a_ptr, ranks_ptr, down_ptr, order_ptr, bounds_ptr, tile_ends_ptr,
                num_groups, num_rows, K, x_stride, part_size,
                unit // PARTS // down_tiles, unit // PARTS % down_tiles, unit % PARTS,
                1, PROJECTIONS, MAX_RANK, BLOCK_M, BLOCK_DOWN, DOWN_INPUTS, BLOCK_E, 1, ONE, EARLY,
            )  # fmt: skip
        # The barrier orders all threads' writes before the release.
        tl.debug_barrier()
        tl.atomic_add(arrivals_ptr, 1, sem="release")
        let_next_begin(EARLY)
    else:
        row_tiles = (num_rows + BLOCK_T - 1) // BLOCK_T
        first_t = (program - num_downs) % row_tiles * BLOCK_T
        tile = (program - num_downs) // row_tiles
        t, first_n = first_t + tl.arange(0, BLOCK_T), tile * BLOCK_N
        n = first_n + tl.arange(0, BLOCK_N)
        real = (t < num_rows)[:, None]
        at = t[:, None] * N + n[None, :]
        # Adapters and groups are older than the kernel before this one.
        numbers = _number_groups(bounds_ptr, num_groups, BLOCK_E)
        ids = tl.load(ids_ptr + t, mask=t < num_rows, other=-1)
        size_out = N + N if GATED else N
        projection = (first_n >= size0).to(tl.int32) + (first_n >= size0 + size1).to(tl.int32)
        steps, all_steps = _count_steps(
            numbers, ranks_ptr, projection, PROJECTIONS, BLOCK_R, BLOCK_J, BLOCK_E
        )
        group, rank = _find_ranks(
            ranks_ptr, numbers, 0, 0, projection, PROJECTIONS, BLOCK_R, BLOCK_J, BLOCK_E
        )
        if GATED:
            up_steps, all_up_steps = _count_steps(
                numbers, ranks_ptr, 1, PROJECTIONS, BLOCK_R, BLOCK_J, BLOCK_E
            )
            _, up_rank = _find_ranks(
                ranks_ptr, numbers, 0, 0, 1, PROJECTIONS, BLOCK_R, BLOCK_J, BLOCK_E
            )
        await_inputs(EARLY)
        if P:
            p = tl.arange(0, BLOCK_P)
            parts = real & (p < P)[None, :]
            squares = tl.load(squares_ptr + t[:, None] * P + p[None, :], mask=parts, other=0.0)
        if ADD:
            residual = tl.load(residual_ptr + at, mask=real, other=0.0)
            norm = tl.load(norm_ptr + n)
        acc, up = multiply_tiles(x_tiles, weight_tiles, first_t, first_n, N, K, GATED, BLOCK_T,
                                 BLOCK_N, BLOCK_K, EARLY)  # fmt: skip
        b = _load_up(b_ptr, group, rank, n, size_out, MAX_RANK)
        if GATED:
            up_b = _load_up(b_ptr, group, up_rank, N + n, size_out, MAX_RANK)
        # The programs that this one waits for began earlier, because their ids are lower.
        arrived = tl.atomic_add(arrivals_ptr, 0, sem="acquire")
        while arrived < num_downs:
            arrived = tl.atomic_add(arrivals_ptr, 0, sem="acquire")
        tl.debug_barrier()  # orders the reads of all threads after the acquire
        acc = _add_up(acc, b, group, rank, down_ptr, ids, t, num_rows, projection, PROJECTIONS,
                      MAX_RANK, PARTS)  # fmt: skip
        if GATED:
            up = _add_up(up, up_b, group, up_rank, down_ptr, ids, t, num_rows, 1, PROJECTIONS,
                         MAX_RANK, PARTS)  # fmt: skip
        together: tl.constexpr = BLOCK_J // BLOCK_R
        for step in tl.range(
            1, all_steps, num_stages=1
        ):  # more stages would need the tiles' memory
            group, rank = _find_ranks(
                ranks_ptr, numbers, step // steps * together, step % steps * BLOCK_R, projection,
                PROJECTIONS, BLOCK_R, BLOCK_J, BLOCK_E,
            )  # fmt: skip
            b = _load_up(b_ptr, group, rank, n, size_out, MAX_RANK)
            acc = _add_up(acc, b, group, rank, down_ptr, ids, t, num_rows, projection, PROJECTIONS,
                          MAX_RANK, PARTS)  # fmt: skip
        if GATED:
            for step in tl.range(1, all_up_steps, num_stages=1):
                group, rank = _find_ranks(
                    ranks_ptr, numbers, step // up_steps * together, step % up_steps * BLOCK_R, 1,
                    PROJECTIONS, BLOCK_R, BLOCK_J, BLOCK_E,
                )  # fmt: skip
                b = _load_up(b_ptr, group, rank, N + n, size_out, MAX_RANK)
                up = _add_up(up, b, group, rank, down_ptr, ids, t, num_rows, 1, PROJECTIONS,
                             MAX_RANK, PARTS)  # fmt: skip
        store_outputs(acc, up, squares if P else acc, bias_ptr, residual if ADD else acc,
                      norm if ADD else acc, out_ptr, product_ptr, out_squares_ptr, t, n, tile, at,
                      real, num_rows, eps, N, K, P, BIAS, GATED, ADD, BLOCK_N)  # fmt: skip


class Division(NamedTuple):
    """The division of a layer and its adapters among programs."""

    tiles: FewRowsTiles  # of the weight
    num_tiles: int
    num_downs: int  # programs that multiply with A
    ranks: int  # ranks of a group that are multiplied with B at a time
    together: int  # groups that are multiplied with B at a time


def divide(
    num_rows: int, weight: torch.Tensor, low_rank: LowRank, groups: RowGroups, gated: bool
) -> Division | None:
    """Divide a layer; None if three kernels are faster, or if this kernel does not support it.

    Three kernels are faster if not all programs can run at the same time, if many groups have rows,
    or if a group has many rows.
    """
    (size_out, size_in), processors = weight.shape, num_multiprocessors(weight.device)
    size_out //= 1 + gated
    tiles = tiles_for(num_rows, size_in, size_out, gated, max(1, processors - SPARE))
    num_tiles = cdiv(num_rows, tiles.rows) * size_out // tiles.outputs
    units = cdiv(low_rank.a.shape[1], BLOCK_DOWN) * groups.groups.num_tiles * PARTS
    num_downs = min(units, tiles.side_by_side * processors - num_tiles)
    most = min(
        MOST_UP, MOST_ROWS_UP // tiles.rows, MOST_OUTPUTS_UP // (tiles.outputs * (1 + gated))
    )
    most_groups = min(num_rows, groups.num_groups)
    together = max(1, min(most // LEAST_RANKS, next_power_of_2(most_groups)))
    ranks = min(MOST_RANKS, most // together, next_power_of_2(low_rank.max_rank))
    ranks = max(LEAST_RANKS, ranks)
    steps = cdiv(most_groups, together) * cdiv(low_rank.max_rank, ranks)
    divided = all(size % tiles.outputs == 0 for size in low_rank.sizes)
    if not divided or num_downs <= 0 or steps > MOST_STEPS or groups.groups.block_m > MOST_TOGETHER:
        return None
    return Division(tiles, num_tiles, num_downs, ranks, together)


def launch(
    rows: RowOperands,
    weight: torch.Tensor,
    low_rank: LowRank,
    groups: RowGroups,
    division: Division,
    arrivals: torch.Tensor,
) -> torch.Tensor:
    """Launch the kernel. Returns the sums of squares, if there are addends.

    `arrivals` is a counter at zero, for one launch. Bytes moved: the weight, A and B of the groups
    that have rows, and the rows.
    """
    ids, sorted_rows, num_rows, num_groups = groups
    x, tiles, (size_out, size_in) = rows.x, division.tiles, (rows.out.shape[1], rows.x.shape[1])
    assert len(x) == num_rows and x.is_contiguous()
    assert low_rank.a.shape[2] == size_in and len(low_rank.sizes) <= MOST_PROJECTIONS
    tensors, constants = rows.arguments(size_out // tiles.outputs)
    max_rank, projections = low_rank.max_rank, len(low_rank.sizes)
    part_size = cdiv(cdiv(size_in, PARTS), 16) * 16
    down_inputs = min(MOST_INPUTS, max(16, next_power_of_2(part_size)))
    down = x.new_empty(PARTS, num_rows, projections * max_rank, dtype=torch.float32)
    size0, size1, _ = (*low_rank.sizes, size_out, size_out)[:3]
    _adapted_kernel[(division.num_downs + division.num_tiles,)](
        tiles_of(with_room(x, tiles.rows), tiles.rows, tiles.inputs),
        tiles_of(weight, tiles.outputs, tiles.inputs),
        x, low_rank.a, low_rank.b, low_rank.ranks, down, ids, sorted_rows.order,
        sorted_rows.bounds, sorted_rows.tile_ends, arrivals, *tensors,
        num_rows, num_groups, x.stride(0), size0, size1, rows.eps,
        division.num_downs, sorted_rows.num_tiles, part_size,
        BLOCK_T=tiles.rows, BLOCK_N=tiles.outputs, BLOCK_K=tiles.inputs,
        PROJECTIONS=projections, MAX_RANK=max_rank, PARTS=PARTS, BLOCK_M=sorted_rows.block_m,
        BLOCK_DOWN=BLOCK_DOWN, DOWN_INPUTS=down_inputs, ONE=part_size <= down_inputs,
        BLOCK_R=division.ranks, BLOCK_J=division.together * division.ranks, BLOCK_E=groups.block_e,
        num_warps=4, num_stages=tiles.stages, **constants,
    )  # fmt: skip
    return tensors[-1]
