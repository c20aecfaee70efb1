"""RowOrdered: a linear layer with projections that files store with their rows in another order.

A rank has a part of each kind of rows, such as queries and gates; in the layer's order, the rows of
a rank are together. Weights can be stored in any format that has rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nanovllm.formats.stored import Loaded, RankPart, Stored, StoredTensor
from nanovllm.layers.linear import LinearBase


def rows_of_kinds(
    sizes: Sequence[int], num_ranks: int, num_groups: int = 1, order: Sequence[int] | None = None
) -> torch.Tensor:
    """The row in files of each row of a projection that has `sizes` rows of each kind.

    Files have groups, each with an equal part of every kind. The layer has the rows of the first
    rank, then those of the next; each has an equal part of every kind, in the given `order`.
    """
    groups = torch.arange(sum(sizes), device="cpu").view(num_groups, -1)
    parts = torch.split(groups, [size // num_groups for size in sizes], dim=1)
    kinds = [part.flatten().chunk(num_ranks) for part in parts]
    chosen = order or range(len(kinds))
    return torch.cat([kinds[kind][rank] for rank in range(num_ranks) for kind in chosen])


class RowOrdered(LinearBase):
    """A linear layer in which some projections have the rows of files in another order.

    `orders` has the row in files of each row of these projections, by their indices.
    """

    def __init__(self, *args: Any, orders: Mapping[int, torch.Tensor], **options: Any) -> None:
        super().__init__(*args, **options)
        self.orders = orders

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        assert isinstance(param, StoredTensor)
        stored, dim = param.stored, param.stored.rows_dim
        rows = self._rows(param.rank_part, stored, shard_id)
        if dim is not None and not torch.equal(rows, torch.arange(len(rows), device="cpu")):
            loaded = _Rows(loaded, dim, _elements(rows, stored.row_unit))
        super().weight_loader(param, loaded, shard_id)

    def outputs(self, projections: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
        """Rows for the outputs of some projections, from the order of files."""
        return rows[self._joined(self.rank_part, projections)]

    def _rows(self, part: RankPart, stored: Stored, shard_id: int | None) -> torch.Tensor:
        """The rows of a tensor's projections, in the tensor."""
        return self._joined(part, part.projections(stored, shard_id))

    def _joined(self, part: RankPart, projections: Sequence[int]) -> torch.Tensor:
        """The rows of these projections in a tensor that joins them as files do."""
        first, joined = 0, []
        for i in projections:
            size = part.sizes[i]
            rows = self.orders[i] if i in self.orders else torch.arange(size, device="cpu")
            joined.append(first + rows)
            first += size
        return torch.cat(joined)


def _elements(rows: torch.Tensor, unit: int) -> torch.Tensor:
    """The elements of an axis of `unit` rows each, in the order of these rows."""
    firsts = rows[::unit]
    blocks = firsts[:, None] + torch.arange(unit, device="cpu")
    if bool((firsts % unit).any()) or not torch.equal(blocks.flatten()[: len(rows)], rows):
        raise ValueError(
            f"the format's blocks of {unit} rows hold rows of several heads of one layer, which"
            " must be taken apart; load this checkpoint with plain weights"
        )
    return firsts // unit


class _Rows:
    """A tensor with the elements of dimension `dim` in another order."""

    def __init__(self, loaded: Loaded, dim: int, elements: torch.Tensor) -> None:
        self._loaded, self._dim, self._elements = loaded, dim, elements
        self.shape = tuple(loaded.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        places = [*(index if isinstance(index, tuple) else (index,))]
        places += [slice(None)] * (self._dim + 1 - len(places))
        places[self._dim] = self._elements[places[self._dim]]
        return self._loaded[tuple(places)]
