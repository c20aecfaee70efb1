"""The plan that the layers of a prefill step share: its sequences, and their tiles.

S sequences.
"""

from dataclasses import dataclass, field

import torch

from nanovllm.kernels.triton.common import can_copy_tiles, can_overlap

MANY_TOKENS = 4096  # tokens of a step: enough work to hide the launch of kernels with copied tiles
LONG = 256  # from this many tokens a sequence on average, the kernel for Hopper is used


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Which tile has which queries.

    Surplus tiles have none. If the last sequence is empty, they are enough for the rows after the
    other sequences' rows.
    """

    seqs: torch.Tensor  # [tiles], int32: a tile's sequence; S for a surplus tile
    ends: torch.Tensor  # [S], int32: tiles of the sequences up to this one


@dataclass(slots=True)
class TiledPrefillPlan:
    """A step's sequences, and its tiles; shared by all layers."""

    cu_seqlens_q: torch.Tensor  # [S + 1], int32
    cu_seqlens_k: torch.Tensor  # [S + 1], int32
    block_tables: torch.Tensor | None  # [S, blocks], int32; None: keys are the step's own
    num_tokens: int
    copies_tiles: bool  # copy tiles of the step's own keys, if their shape allows it
    overlaps: bool  # use the kernel for Hopper GPUs, if it fits a layer
    _tiles: dict[int, QueryTiles] = field(default_factory=dict)  # by their queries

    def tiles(self, queries: int) -> QueryTiles:
        """Divide the step into tiles of up to `queries`, on the device, in a few short launches.

        The first layer does it for all layers.
        """
        if queries not in self._tiles:
            tiles = (self.cu_seqlens_q.diff() + queries - 1) // queries
            ends = tiles.cumsum(0, dtype=torch.int32)
            most = self.num_tokens // queries + len(tiles)  # a bound that needs no sync
            numbers = torch.arange(most, dtype=torch.int32, device=ends.device)
            seqs = torch.searchsorted(ends, numbers, right=True, out_int32=True)
            self._tiles[queries] = QueryTiles(seqs, ends)
        return self._tiles[queries]


def plan_prefill(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    block_tables: torch.Tensor | None,
    num_tokens: int,
) -> TiledPrefillPlan:
    """The plan of a step of `num_tokens` queries. All tensors are on the device."""
    device = cu_seqlens_q.device
    copies = num_tokens >= MANY_TOKENS and can_copy_tiles(device)
    enough = MANY_TOKENS if block_tables is None else MANY_TOKENS // 2
    long = num_tokens >= max(enough, LONG * (len(cu_seqlens_q) - 1))
    overlaps = long and can_overlap(device)
    return TiledPrefillPlan(cu_seqlens_q, cu_seqlens_k, block_tables, num_tokens, copies, overlaps)
