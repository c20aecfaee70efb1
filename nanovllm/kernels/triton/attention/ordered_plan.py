"""The plan of decode steps whose sums have one order: contexts, divided evenly at chunks of keys.

B sequences, Q queries of each, KVH key heads, P programs for each key head.

As in `decode_plan`, all contexts form one line of tiles with P shares of equal size. As a chunk is
never divided, a share begins where the chunk at its place on the line begins. A program that begins
in the middle of a row stores the sums of each of the row's chunks. There is a slot for every
CHUNK_TILES tiles of the line; if the line is longer, no row is divided.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.triton.attention.decode_plan import (
    BLOCK_B,
    HALF,
    PROGRAMS_PER_MULTIPROCESSOR,
    _tiles,
)
from nanovllm.kernels.triton.attention.ordered import CHUNK
from nanovllm.kernels.triton.attention.queries import longest
from nanovllm.kernels.triton.common import TILE, can_copy_tiles, num_multiprocessors

CHUNK_TILES = CHUNK // TILE
SLOTS_BYTES = 48 << 20  # of stored sums, at most


@dataclass(slots=True)
class OrderedDecodePlan:
    """A batch's contexts, and their division among programs; shared by all layers."""

    context_lens: torch.Tensor  # [B * Q], int32; 0 for rows that are not used
    block_tables: torch.Tensor  # [B, blocks], int32
    # [P + 1, 5], int32: first row, tiles before it, its length, tiles before the share, and
    # the program that has the row's first chunk
    starts: torch.Tensor
    arrivals: torch.Tensor  # [P, KVH], int32: chunks that are finished of the row divided there
    copies_tiles: bool  # copy tiles of keys, if their shape allows it
    num_queries: int  # queries of a sequence
    slots: int  # chunks that can be stored


@triton.jit(do_not_specialize=["batch_size", "slots"])
def _ordered_plan_kernel(  # type: ignore[no-untyped-def]
    lens_ptr, starts_ptr, arrivals_ptr, begins_ptr, batch_size, num_kv_heads, slots,
    BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr, TILE: tl.constexpr, CHUNK_TILES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Find the start of a program's share. One more program than there are shares finds the end.

    If a row is divided, the program of its first chunk counts the chunks that are finished. The
    first program writes each row's first tile and first program, if they are asked for.
    """
    program = tl.program_id(0)
    num_tiles = tl.zeros([], tl.int32)
    for first in range(0, batch_size, BLOCK_B):
        num_tiles += tl.sum(_tiles(lens_ptr, first, batch_size, BLOCK_B, TILE, ROWS), axis=0)
    # At most one share begins in a chunk.
    share = tl.maximum(tl.cdiv(num_tiles, tl.num_programs(0) - 1), CHUNK_TILES)
    place = tl.minimum(program * share, num_tiles)
    seen = tl.zeros([], tl.int32)
    row = tl.zeros([], tl.int32)
    row_begin = tl.zeros([], tl.int32)
    for first in range(0, batch_size, BLOCK_B):
        tiles = _tiles(lens_ptr, first, batch_size, BLOCK_B, TILE, ROWS)
        before = (seen + tl.cumsum(tiles, axis=0) <= place) & (tiles > 0)
        row += tl.sum(before.to(tl.int32), axis=0)
        row_begin += tl.sum(tl.where(before, tiles, 0), axis=0)
        if begins_ptr is not None:
            rows = first + tl.arange(0, BLOCK_B)
            written = (rows < batch_size) & (program == 0)
            begins = seen + tl.cumsum(tiles, axis=0) - tiles
            tl.store(begins_ptr + rows * 2, begins, mask=written)
            chunk_ends = begins + tl.minimum(tiles, CHUNK_TILES)
            tl.store(begins_ptr + rows * 2 + 1, (chunk_ends - 1) // share, mask=written)
        seen += tl.sum(tiles, axis=0)
    length = longest(lens_ptr, row, row < batch_size, ROWS)
    start = row_begin
    if num_tiles <= slots * CHUNK_TILES:
        start += (place - row_begin) // CHUNK_TILES * CHUNK_TILES
    chunk_end = tl.minimum(CHUNK_TILES, tl.maximum(tl.cdiv(length, TILE), 1))
    at = starts_ptr + program * 5
    tl.store(at, row)
    tl.store(at + 1, row_begin)
    tl.store(at + 2, length)
    tl.store(at + 3, start)
    tl.store(at + 4, (row_begin + chunk_end - 1) // share)
    if program < tl.num_programs(0) - 1:
        h = tl.arange(0, BLOCK_H)
        arrivals_at = arrivals_ptr + program * num_kv_heads + h
        tl.store(arrivals_at, tl.zeros([BLOCK_H], tl.int32), mask=h < num_kv_heads)


def plan_ordered_decode(
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    heads: tuple[int, int, int],
    block_size: int,
    copies_tiles: bool,
    num_queries: int = 1,
) -> OrderedDecodePlan:
    """Divide a batch's contexts among programs, on the device; as `plan_decode`.

    `heads` are the numbers of query heads and key heads, and the head dimension.
    """
    device = context_lens.device
    num_heads, num_kv_heads, head_dim = heads
    programs = num_multiprocessors(device) * PROGRAMS_PER_MULTIPROCESSOR // num_kv_heads
    if num_queries > 1 and num_queries * num_heads // num_kv_heads > HALF:
        programs //= 2
    programs = max(1, programs)
    size = 4 * num_queries * num_heads * head_dim
    slots = slots_for(block_tables, block_size, size, SLOTS_BYTES)
    starts, arrivals = divide_at_chunks(context_lens, num_queries, programs, num_kv_heads, slots)
    copies_tiles = copies_tiles and can_copy_tiles(device)
    return OrderedDecodePlan(
        context_lens, block_tables, starts, arrivals, copies_tiles, num_queries, slots
    )


def slots_for(block_tables: torch.Tensor, block_size: int, size: int, most_bytes: int) -> int:
    """The chunks of `size` bytes that may be stored: as tables have room for, or memory."""
    # An unused row has a tile.
    in_tables = block_tables.shape[0] * max(1, cdiv(block_tables.shape[1] * block_size, TILE))
    return max(1, min(cdiv(in_tables, CHUNK_TILES), most_bytes // size))


def divide_at_chunks(
    context_lens: torch.Tensor,
    num_queries: int,
    programs: int,
    num_kv_heads: int,
    slots: int,
    begins: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `starts` and `arrivals` of a plan.

    Writes each sequence's first tile, and the program of its first chunk, to `begins` [B, 2].
    """
    device = context_lens.device
    starts = torch.empty(programs + 1, 5, dtype=torch.int32, device=device)
    arrivals = torch.empty(programs, num_kv_heads, dtype=torch.int32, device=device)
    _ordered_plan_kernel[(programs + 1,)](
        context_lens, starts, arrivals, begins, len(context_lens) // num_queries, num_kv_heads,
        slots, BLOCK_B=BLOCK_B, BLOCK_H=next_power_of_2(num_kv_heads), TILE=TILE,
        CHUNK_TILES=CHUNK_TILES, ROWS=num_queries,
    )  # fmt: skip
    return starts, arrivals
