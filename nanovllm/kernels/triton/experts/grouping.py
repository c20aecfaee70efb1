"""Pairs of a token and an expert, sorted by expert and divided into tiles.

T tokens, K experts of each, N = T * K pairs, E experts of this rank. A tile is up to BLOCK_M pairs
of one expert.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import next_power_of_2

LEAST, MOST = 16, 64  # pairs of a tile


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

    order: torch.Tensor  # [N]
    bounds: torch.Tensor  # [E + 1] int32
    tile_ends: torch.Tensor  # [E] int32
    num_tiles: int  # an upper bound
    block_m: int


def group(expert_ids: torch.Tensor, num_here: int, num_experts: int) -> Groups:
    """Sort the pairs of expert_ids [T, K] by expert, on the device."""
    num_pairs = expert_ids.numel()
    block_m = pairs_of_a_tile(num_pairs, num_experts)
    ids, order = expert_ids.flatten().sort(stable=True)
    experts = torch.arange(-1, num_here, device=ids.device)
    bounds = torch.searchsorted(ids, experts, right=True, out_int32=True)
    tile_ends = ((bounds.diff() + (block_m - 1)) // block_m).cumsum(0, dtype=torch.int32)
    return Groups(order, bounds, tile_ends, most_tiles(num_pairs, num_here, block_m), block_m)


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
