"""RowOrdered: a linear layer with projections that files store with their rows in another order.

A rank's rows of a projection are together in the layer's order: the rows of all its kinds, such as
queries, keys and values. Weights can be stored in any format that has rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from nanovllm.formats.stored import Loaded, RankPart, Stored, StoredTensor
from nanovllm.layers.linear import LinearBase

Runs = Sequence[slice]  # the rows of files, in the layer's order


def rows_of_kinds(
    sizes: Sequence[int], num_ranks: int, num_groups: int = 1, order: Sequence[int] | None = None
) -> Runs:
    """The rows of a projection that has `sizes` rows of each kind, for `num_ranks` ranks.

    Files have groups, each with an equal part of every kind. The layer has the rows of the first
    rank, then those of the next; a rank has an equal part of each kind, in the given `order`.
    """
    parts = [size // num_groups for size in sizes]  # of each kind, in a group
    firsts = [*accumulate(parts, initial=0)]
    runs: list[slice] = []
    for rank in range(num_ranks):
        for kind in order or range(len(sizes)):
            part, stop = parts[kind], sizes[kind] * (rank + 1) // num_ranks
            row = sizes[kind] * rank // num_ranks
            while row < stop:
                group, inside = divmod(row, part)
                count = min(stop - row, part - inside)
                first = group * firsts[-1] + firsts[kind] + inside
                _append(runs, slice(first, first + count))
                row += count
    return runs


def _append(runs: list[slice], run: slice) -> None:
    """Append a run, or let it extend the last one."""
    if runs and runs[-1].stop == run.start:
        run = slice(runs.pop().start, run.stop)
    runs.append(run)


class RowOrdered(LinearBase):
    """A linear layer in which some projections have the rows of files in another order.

    `orders` has the rows of these projections, by their indices.
    """

    def __init__(self, *args: Any, orders: Mapping[int, Runs], **options: Any) -> None:
        super().__init__(*args, **options)
        self.orders = orders

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        assert isinstance(param, StoredTensor)
        stored, dim = param.stored, param.stored.rows_dim
        shown = param.rank_part.projections(stored, shard_id)
        runs = self.runs(param.rank_part, shown)
        if dim is not None and len(runs) > 1:
            loaded = _Rows(loaded, dim, _in_units(runs, stored))
        super().weight_loader(param, loaded, shard_id)

    def runs(self, part: RankPart, projections: Sequence[int]) -> Runs:
        """The rows of these projections in a tensor that joins them as files do."""
        runs: list[slice] = []
        firsts = accumulate((part.sizes[i] for i in projections), initial=0)
        for first, i in zip(firsts, projections, strict=False):
            for run in self.orders.get(i, [slice(0, part.sizes[i])]):
                _append(runs, slice(first + run.start, first + run.stop))
        return runs

    def outputs(self, projections: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
        """Rows for the outputs of some projections, from the order of files."""
        return torch.cat([rows[run] for run in self.runs(self.rank_part, projections)])


def _in_units(runs: Runs, stored: Stored) -> Runs:
    """The elements of a tensor's axis that belong to these rows."""
    unit = stored.row_unit
    if any(run.start % unit or run.stop % unit for run in runs):
        raise ValueError(f"blocks of {unit} rows, but heads whose rows do not begin with a block")
    return [slice(run.start // unit, run.stop // unit) for run in runs]


class _Rows:
    """A tensor with the parts `runs` of the dimension `dim` one after the other."""

    def __init__(self, loaded: Loaded, dim: int, runs: Runs) -> None:
        self._loaded, self._dim, self._runs = loaded, dim, runs
        self.shape = tuple(loaded.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        given = index if isinstance(index, tuple) else (index,)
        places = [*given, *[slice(None)] * (self._dim + 1 - len(given))]
        start, stop, _ = places[self._dim].indices(self.shape[self._dim])
        parts = []
        for run in _between(self._runs, start, stop):
            places[self._dim] = run
            parts.append(self._loaded[tuple(places)])
        return parts[0] if len(parts) == 1 else torch.cat(parts, self._dim)


def _between(runs: Runs, start: int, stop: int) -> Iterator[slice]:
    """The runs of the rows `start` to `stop` of the layer's order; one that is empty for none."""
    first, found = 0, False
    for run in runs:
        last = first + run.stop - run.start
        begin, end = max(start, first), min(stop, last)
        if begin < end:
            yield slice(run.start + begin - first, run.start + end - first)
            found = True
        first = last
    if not found:
        yield slice(0, 0)
