"""Sort rows by group: the rows of a group are multiplied by the same matrices.

T rows, G groups. Rows without a group form one more group, after the others.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import next_power_of_2
from nanovllm.kernels.triton.experts.grouping import Groups, group, most_tiles, pairs_of_a_tile

MOST_COUNTED = 1 << 14  # the most rows * groups that one program counts


class RowGroups(NamedTuple):
    """Rows sorted by group, and their tiles. `ids` [T] are the groups of the rows, unsorted."""

    ids: torch.Tensor
    groups: Groups
    num_rows: int
    num_groups: int

    @property
    def block_e(self) -> int:
        """The number of groups that a program reads to find its own."""
        return next_power_of_2(self.num_groups + 1)


@triton.jit(do_not_specialize=["num_rows"])
def _group_kernel(  # type: ignore[no-untyped-def]
    ids_ptr, order_ptr, bounds_ptr, tile_ends_ptr, num_rows, num_groups,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program counts the rows of each group, and finds the place of each row."""
    t = tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    ids = tl.load(ids_ptr + t, mask=t < num_rows, other=-1)
    ids = tl.where((ids >= 0) & (ids < num_groups), ids, num_groups)
    is_of = (ids[:, None] == e[None, :]) & (t < num_rows)[:, None]
    nth = tl.cumsum(is_of.to(tl.int32), axis=0)
    counts = tl.sum(is_of.to(tl.int32), axis=0)
    ends = tl.cumsum(counts, axis=0)
    place = tl.sum(tl.where(is_of, nth - 1 + (ends - counts)[None, :], 0), axis=1)
    tl.store(order_ptr + place, t, mask=t < num_rows)
    exists = e <= num_groups
    tl.store(bounds_ptr + e, ends - counts, mask=exists)
    tl.store(bounds_ptr + e + 1, ends, mask=exists & (e == num_groups))
    tl.store(tile_ends_ptr + e, tl.cumsum((counts + BLOCK_M - 1) // BLOCK_M, axis=0), mask=exists)


def group_rows(group_ids: torch.Tensor, num_groups: int) -> RowGroups:
    """Sort rows with these group ids [T] int32; a row with an id outside [0, num_groups) has none.

    For few rows this is one kernel.
    """
    num_rows, groups = len(group_ids), num_groups + 1
    block_t, block_e = next_power_of_2(max(1, num_rows)), next_power_of_2(groups)
    if not num_rows or block_t * block_e > MOST_COUNTED:
        outside = (group_ids < 0) | (group_ids >= num_groups)
        ids = group_ids.masked_fill(outside, num_groups)
        return RowGroups(ids, group(ids, groups, groups), num_rows, num_groups)
    group_ids = group_ids.contiguous()
    block_m = pairs_of_a_tile(num_rows, groups)
    order, bounds, tile_ends = (
        group_ids.new_empty(size, dtype=torch.int32) for size in (num_rows, groups + 1, groups)
    )
    _group_kernel[(1,)](
        group_ids, order, bounds, tile_ends, num_rows, num_groups,
        BLOCK_M=block_m, BLOCK_T=block_t, BLOCK_E=block_e, num_warps=8,
    )  # fmt: skip
    tiles = most_tiles(num_rows, groups, block_m)
    return RowGroups(
        group_ids, Groups(order, bounds, tile_ends, tiles, block_m), num_rows, num_groups
    )
