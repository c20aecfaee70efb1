"""Sort pairs of a token and an expert by expert, and divide them into tiles of one expert's pairs.

T tokens, K experts of each, N = T * K pairs, E experts of this rank. It is a counting sort: one
launch for few pairs, three for more. A bin has the pairs of one expert; the first and the last bin
have the pairs of other ranks' experts. `group` returns where the tiles of each expert end, and
`tile_pairs` describes each tile.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2

LEAST, MOST = 16, 64  # pairs of a tile, for few pairs
CHUNK = 128  # pairs that a program counts and places
FEW = 256  # the most pairs that one program counts and places alone
PART = 16  # pairs that are compared with the whole chunk at a time
SCANNED = 1024  # chunks with counts that are added up at a time


def pairs_of_a_tile(num_pairs: int, num_experts: int) -> int:
    """A tile size so that nearly every expert has one tile, if pairs are distributed evenly.

    A second tile of an expert would read its weights again.
    """
    mean = max(1, num_pairs // num_experts)
    return max(LEAST, min(MOST, next_power_of_2(mean + mean // 2)))


class Groups(NamedTuple):
    """Pairs sorted by expert, and where the pairs and the tiles of each expert of this rank end.

    An expert's pairs begin where those of the previous expert end. Pairs of other ranks' experts
    come before the first and after the last expert.
    """

    order: torch.Tensor  # [N] int32
    bounds: torch.Tensor  # [E + 1] int32
    tile_ends: torch.Tensor  # [E] int32
    num_tiles: int  # an upper bound
    block_m: int


def most_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """The most tiles that any division of the pairs among the experts can have."""
    return num_pairs // block_m + min(num_experts, num_pairs)


@triton.jit
def find_tile(  # type: ignore[no-untyped-def]
    tile, bounds_ptr, tile_ends_ptr, num_experts, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The expert of a tile, the places of its pairs in the order, and which of these exist.

    A surplus tile has the expert `num_experts`, and no pairs.
    """
    e = tl.arange(0, BLOCK_E)
    tile_ends = tl.load(tile_ends_ptr + e, mask=e < num_experts, other=0x7FFFFFFF)
    expert = tl.sum((tile_ends <= tile).to(tl.int32), axis=0)
    exists = expert < num_experts
    before = tl.maximum(expert - 1, 0)
    first_tile = tl.load(tile_ends_ptr + before, mask=exists & (expert > 0), other=0)
    start = tl.load(bounds_ptr + expert, mask=exists, other=0)
    stop = tl.load(bounds_ptr + expert + 1, mask=exists, other=0)
    place = start + (tile - first_tile) * BLOCK_M + tl.arange(0, BLOCK_M)
    return expert, place, place < stop


class TiledPairs(NamedTuple):
    """Pairs sorted by expert, and tiles of up to `rows` pairs of one expert.

    Pairs of other ranks' experts come before and after the pairs of tiles.
    """

    order: torch.Tensor  # [N] int32
    # [most, 3] int32: expert, first place in `order`, end of the expert's places
    tiles: torch.Tensor
    num_tiles: torch.Tensor  # [1] int32
    rows: int


@triton.jit
def _bins(ids_ptr, pair, num_pairs, num_here, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bins of pairs; pairs that do not exist are in the last bin, after all others."""
    expert = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=BINS)
    expert = tl.minimum(tl.maximum(expert, -1), num_here).to(tl.int32)
    return tl.where(pair < num_pairs, expert + 1, BINS - 1)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks"])
def _count_kernel(  # type: ignore[no-untyped-def]
    ids_ptr, counts_ptr, num_pairs, num_here, num_chunks, BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Count the pairs of one chunk in each bin."""
    chunk = tl.program_id(0)
    bins = _bins(ids_ptr, chunk * CHUNK + tl.arange(0, CHUNK), num_pairs, num_here, BINS)
    counts = tl.histogram(bins, BINS)
    tl.store(counts_ptr + tl.arange(0, BINS) * num_chunks + chunk, counts)


@triton.jit(do_not_specialize=["num_chunks"])
def _scan_kernel(  # type: ignore[no-untyped-def]
    counts_ptr, totals_ptr, num_chunks, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace the counts of one bin by the number of its pairs in earlier chunks."""
    counts_ptr += tl.program_id(0) * num_chunks
    total = 0
    for first in range(0, num_chunks, BLOCK):
        chunk = first + tl.arange(0, BLOCK)
        counts = tl.load(counts_ptr + chunk, mask=chunk < num_chunks, other=0)
        before = total + tl.cumsum(counts, axis=0) - counts
        tl.store(counts_ptr + chunk, before, mask=chunk < num_chunks)
        total += tl.sum(counts, axis=0)
    tl.store(totals_ptr + tl.program_id(0), total)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks"])
def _place_kernel(  # type: ignore[no-untyped-def]
    ids_ptr, before_ptr, totals_ptr, order_ptr, tiles_ptr, ends_ptr,
    num_pairs, num_here, num_chunks, ROWS: tl.constexpr, TILES: tl.constexpr, BINS: tl.constexpr,
    CHUNK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Place the pairs of one chunk, and describe TILES tiles; or, without TILES, all ends."""
    chunk = tl.program_id(0)
    totals = tl.load(totals_ptr + tl.arange(0, BINS))
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    bins = _bins(ids_ptr, pair, num_pairs, num_here, BINS)
    before = tl.load(before_ptr + bins * num_chunks + chunk)
    _place(ids_ptr, totals, pair, bins, before, order_ptr, num_pairs, num_here, chunk * CHUNK,
           BINS, CHUNK, PART)  # fmt: skip
    if TILES:
        _describe(totals, tiles_ptr, ends_ptr, num_here, chunk * TILES, ROWS, TILES, BINS)
    elif chunk == 0:
        _bound(totals, tiles_ptr, ends_ptr, num_here, ROWS, BINS)


@triton.jit(do_not_specialize=["num_pairs"])
def _few_kernel(  # type: ignore[no-untyped-def]
    ids_ptr, order_ptr, tiles_ptr, ends_ptr, num_pairs, num_here,
    ROWS: tl.constexpr, TILES: tl.constexpr, BINS: tl.constexpr, PAIRS: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Place up to PAIRS pairs, and describe up to TILES tiles; or, without TILES, all ends."""
    pair = tl.arange(0, PAIRS)
    bins = _bins(ids_ptr, pair, num_pairs, num_here, BINS)
    totals = tl.histogram(bins, BINS)
    _place(ids_ptr, totals, pair, bins, 0, order_ptr, num_pairs, num_here, 0, BINS, PAIRS, PART)
    if TILES:
        for first in range(0, TILES, PART):
            _describe(totals, tiles_ptr, ends_ptr, num_here, first, ROWS, PART, BINS)
    else:
        _bound(totals, tiles_ptr, ends_ptr, num_here, ROWS, BINS)


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    ids_ptr, totals, pair, bins, before, order_ptr, num_pairs, num_here, first_pair,
    BINS: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Place the pairs of a chunk, from the bins' totals and their pairs in earlier chunks."""
    starts = tl.cumsum(totals, axis=0) - totals
    place = tl.gather(starts, bins, axis=0) + before
    for first in range(0, CHUNK, PART):
        other = first_pair + first + tl.arange(0, PART)
        others = _bins(ids_ptr, other, num_pairs, num_here, BINS)
        earlier = (others[None, :] == bins[:, None]) & (other[None, :] < pair[:, None])
        place += tl.sum(earlier.to(tl.int32), axis=1)
    tl.store(order_ptr + place, pair, mask=pair < num_pairs)


@triton.jit
def _describe(  # type: ignore[no-untyped-def]
    totals, tiles_ptr, num_tiles_ptr, num_here, first_tile,
    ROWS: tl.constexpr, TILES: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Describe TILES tiles, those of them that exist."""
    b = tl.arange(0, BINS)
    starts = tl.cumsum(totals, axis=0) - totals
    here = (b > 0) & (b <= num_here)
    counts = tl.where(here, (totals + (ROWS - 1)) // ROWS, 0)
    ends = tl.cumsum(counts, axis=0)
    num_tiles = tl.sum(counts, axis=0)
    tile = first_tile + tl.arange(0, TILES)
    inside = (ends - counts)[None, :] <= tile[:, None]
    mine = (inside & (tile[:, None] < ends[None, :])).to(tl.int32)  # one bin, if the tile exists
    place = (starts - (ends - counts) * ROWS)[None, :] + tile[:, None] * ROWS
    at = tiles_ptr + tile * 3
    tl.store(at, tl.sum(mine * (b - 1)[None, :], axis=1), mask=tile < num_tiles)
    tl.store(at + 1, tl.sum(mine * place, axis=1), mask=tile < num_tiles)
    tl.store(at + 2, tl.sum(mine * (starts + totals)[None, :], axis=1), mask=tile < num_tiles)
    tl.store(num_tiles_ptr, num_tiles)  # the same number in all programs


@triton.jit
def _bound(  # type: ignore[no-untyped-def]
    totals, bounds_ptr, tile_ends_ptr, num_here, ROWS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Store where the pairs and the tiles of each expert end."""
    b = tl.arange(0, BINS)
    tl.store(bounds_ptr + b, tl.cumsum(totals, axis=0), mask=b <= num_here)
    here = (b > 0) & (b <= num_here)
    tiles = tl.where(here, (totals + (ROWS - 1)) // ROWS, 0)
    tl.store(tile_ends_ptr + b - 1, tl.cumsum(tiles, axis=0), mask=here)


def group(expert_ids: torch.Tensor, num_here: int, num_experts: int) -> Groups:
    """Sort the pairs of expert_ids [T, K] by expert, on the device; an expert's stay in order."""
    num_pairs, ints = expert_ids.numel(), partial(_int32, expert_ids.device)
    rows = pairs_of_a_tile(num_pairs, num_experts)
    most = most_tiles(num_pairs, num_here, rows)
    groups = Groups(ints(num_pairs), ints(num_here + 1), ints(num_here), most, rows)
    _sort(expert_ids, num_here, groups[:3], rows, 0)
    return groups


def tile_pairs(expert_ids: torch.Tensor, num_here: int, rows: int) -> TiledPairs:
    """Sort the pairs of expert_ids [T, K] by expert, on the device; an expert's stay in order."""
    num_pairs, ints = expert_ids.numel(), partial(_int32, expert_ids.device)
    most = most_tiles(num_pairs, num_here, rows)
    pairs = TiledPairs(ints(num_pairs), ints(most, 3), ints(1), rows)
    _sort(expert_ids, num_here, pairs[:3], rows, most)
    return pairs


def _int32(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=device)


def _sort(
    expert_ids: torch.Tensor,
    num_here: int,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rows: int,
    most_tiles: int,
) -> None:
    """Write the order, and tiles with their number; or bounds and ends, if `most_tiles` is zero."""
    assert expert_ids.is_contiguous()
    num_pairs, bins = expert_ids.numel(), next_power_of_2(num_here + 2)
    num_chunks, ints = cdiv(num_pairs, CHUNK), partial(_int32, expert_ids.device)
    if num_pairs <= FEW:
        tiles = next_power_of_2(most_tiles) if most_tiles else 0
        _few_kernel[(1,)](
            expert_ids, *out, num_pairs, num_here, ROWS=rows, TILES=tiles,
            BINS=bins, PAIRS=max(CHUNK, next_power_of_2(num_pairs)), PART=PART, num_warps=8,
        )  # fmt: skip
        return
    counts, totals = ints(bins, num_chunks), ints(bins)
    _count_kernel[(num_chunks,)](
        expert_ids, counts, num_pairs, num_here, num_chunks, BINS=bins, CHUNK=CHUNK, num_warps=4
    )
    block = min(SCANNED, next_power_of_2(num_chunks))
    _scan_kernel[(bins,)](counts, totals, num_chunks, BLOCK=block, num_warps=4)
    tiles = next_power_of_2(cdiv(most_tiles, num_chunks)) if most_tiles else 0
    _place_kernel[(num_chunks,)](
        expert_ids, counts, totals, *out, num_pairs, num_here, num_chunks,
        ROWS=rows, TILES=tiles, BINS=bins, CHUNK=CHUNK, PART=PART, num_warps=4,
    )  # fmt: skip
