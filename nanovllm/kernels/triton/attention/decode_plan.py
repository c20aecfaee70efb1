"""The plan that the layers of a decode step share: the contexts, divided evenly among programs.

B sequences, Q queries of each, KVH key heads, P programs for each key head.

The tiles of all contexts of a batch form one line, which is divided into P shares of equal size, so
that all programs start and end together for any lengths. The line is divided on the device, so a
CUDA graph can contain the launch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import next_power_of_2
from nanovllm.kernels.triton.attention.queries import longest
from nanovllm.kernels.triton.common import TILE, can_copy_tiles, num_multiprocessors

PROGRAMS_PER_MULTIPROCESSOR = 4  # as many as registers and shared memory allow
MIN_SHARE = 2  # tiles of a share: merging smaller ones costs more than they save
BLOCK_B = 512  # sequences that the plan reads at a time
HALF = 32  # with more queries of a key head, half as many programs run at the same time


@dataclass(slots=True)
class DecodePlan:
    """A batch's contexts, and their division among programs; shared by all layers."""

    context_lens: torch.Tensor  # [B * Q], int32; 0 for rows that are not used
    block_tables: torch.Tensor  # [B, blocks], int32
    starts: torch.Tensor  # [P, 4], int32: first row, tiles before it, its length, the share's size
    arrivals: torch.Tensor  # [P, KVH], int32: programs that have finished the row divided there
    copies_tiles: bool  # copy tiles of keys, if their shape allows it
    num_queries: int  # queries of a sequence


@triton.jit
def _tiles(  # type: ignore[no-untyped-def]
    lens_ptr, first, batch_size, BLOCK_B: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Tiles of the sequences `first + [0, BLOCK_B)`; at least one each, as each has output."""
    row = first + tl.arange(0, BLOCK_B)
    lens = longest(lens_ptr, row, row < batch_size, ROWS)
    return tl.where(row < batch_size, tl.maximum(tl.cdiv(lens, TILE), 1), 0)


@triton.jit(do_not_specialize=["batch_size"])
def _plan_kernel(  # type: ignore[no-untyped-def]
    lens_ptr, starts_ptr, arrivals_ptr, begins_ptr, batch_size, num_kv_heads,
    BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr, TILE: tl.constexpr, MIN_SHARE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Find the start of a program's share: its first row, and the tiles of the rows before it.

    The first program writes the tiles before each row, if they are asked for.
    """
    program = tl.program_id(0)
    total = tl.zeros([], tl.int32)
    for first in range(0, batch_size, BLOCK_B):
        total += tl.sum(_tiles(lens_ptr, first, batch_size, BLOCK_B, TILE, ROWS), axis=0)
    share = tl.maximum(tl.cdiv(total, tl.num_programs(0)), MIN_SHARE)
    seen = tl.zeros([], tl.int32)
    row = tl.zeros([], tl.int32)
    row_begin = tl.zeros([], tl.int32)
    for first in range(0, batch_size, BLOCK_B):
        tiles = _tiles(lens_ptr, first, batch_size, BLOCK_B, TILE, ROWS)
        before = (seen + tl.cumsum(tiles, axis=0) <= program * share) & (tiles > 0)
        row += tl.sum(before.to(tl.int32), axis=0)
        row_begin += tl.sum(tl.where(before, tiles, 0), axis=0)
        if begins_ptr is not None:
            rows = first + tl.arange(0, BLOCK_B)
            begins = seen + tl.cumsum(tiles, axis=0) - tiles
            tl.store(begins_ptr + rows, begins, mask=(rows < batch_size) & (program == 0))
        seen += tl.sum(tiles, axis=0)
    tl.store(starts_ptr + program * 4, row)
    tl.store(starts_ptr + program * 4 + 1, row_begin)
    length = longest(lens_ptr, row, row < batch_size, ROWS)
    tl.store(starts_ptr + program * 4 + 2, length)
    tl.store(starts_ptr + program * 4 + 3, share)
    h = tl.arange(0, BLOCK_H)
    at = arrivals_ptr + program * num_kv_heads + h
    tl.store(at, tl.zeros([BLOCK_H], tl.int32), mask=h < num_kv_heads)


def plan_decode(
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    num_kv_heads: int,
    copies_tiles: bool,
    num_queries: int = 1,
    group: int = 1,
) -> DecodePlan:
    """Divide a batch's contexts among programs, on the device. Reads lengths, writes a few KiB.

    The attention reads the plan while the kernel before it ends; so that must be another kernel.

    A sequence has `num_queries` rows, at consecutive positions, and one row of `block_tables`.
    `context_lens` [B * num_queries] has the number of keys that each row sees, including its own: 0
    for unused rows, which are the last ones of a sequence or all. `group` heads share a key head.
    """
    device = context_lens.device
    programs = num_multiprocessors(device) * PROGRAMS_PER_MULTIPROCESSOR // num_kv_heads
    if num_queries > 1 and num_queries * group > HALF:
        programs //= 2
    starts, arrivals = divide(context_lens, num_queries, max(1, programs), num_kv_heads)
    copies_tiles = copies_tiles and can_copy_tiles(device)
    return DecodePlan(context_lens, block_tables, starts, arrivals, copies_tiles, num_queries)


def divide(
    context_lens: torch.Tensor,
    num_queries: int,
    programs: int,
    num_kv_heads: int,
    begins: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `starts` and `arrivals` of a plan; writes the tiles before each sequence to `begins`."""
    device = context_lens.device
    starts = torch.empty(programs, 4, dtype=torch.int32, device=device)
    arrivals = torch.empty(programs, num_kv_heads, dtype=torch.int32, device=device)
    _plan_kernel[(programs,)](
        context_lens, starts, arrivals, begins, len(context_lens) // num_queries, num_kv_heads,
        BLOCK_B=BLOCK_B, BLOCK_H=next_power_of_2(num_kv_heads), TILE=TILE,
        MIN_SHARE=MIN_SHARE, ROWS=num_queries,
    )  # fmt: skip
    return starts, arrivals
