"""FileOrder: how files store a linear layer's weight, if it is not how the layer has it.

The loader, updates of weights, and random weights read the files' tensors through the layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from nanovllm.formats.stored import Loaded
from nanovllm.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.layers.row_order import RowOrdered


class FileOrder(ABC):
    """Shows a file's tensor as the layer has it. Only the indexed part is read."""

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in files of a tensor, or of a part of it."""
        return shape

    def outputs(self, rows: torch.Tensor) -> torch.Tensor:
        """A tensor with a row for each of the layer's outputs, from the order of files."""
        return rows

    @abstractmethod
    def view(self, loaded: Loaded, shard_id: int | None) -> Loaded:
        """The tensor, or the part `shard_id` of a fused one, as the layer has it."""


class HeadOrder(FileOrder):
    """Fused projections in groups: `per_key` query heads, the key head and the value head of these.

    The layer has all query heads, all key heads, and all value heads. Files with a tensor for each
    projection have the layer's order.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self.sizes = num_kv_heads, num_heads // num_kv_heads, head_dim

    def rows(self) -> torch.Tensor:
        """The row in files of each of the layer's rows."""
        num_groups, per_key, head_dim = self.sizes
        files = torch.arange(num_groups * (per_key + 2) * head_dim, device="cpu")
        heads = files.view(num_groups, per_key + 2, head_dim)
        kinds = heads[:, :per_key], heads[:, per_key], heads[:, per_key + 1]
        return torch.cat([kind.flatten() for kind in kinds])

    def outputs(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[self.rows()]

    def view(self, loaded: Loaded, shard_id: int | None) -> Loaded:
        return loaded if shard_id is not None else _Rows(loaded, self.rows())


class Transposed(FileOrder):
    """Matrices [in, out]."""

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1]

    def view(self, loaded: Loaded, shard_id: int | None) -> Loaded:  # noqa: ARG002
        return _Transposed(loaded) if len(loaded.shape) == 2 else loaded


class _Rows:
    """A tensor with its rows in another order."""

    def __init__(self, loaded: Loaded, rows: torch.Tensor) -> None:
        self._loaded, self._rows = loaded, rows
        self.shape = tuple(loaded.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        first, *others = index if isinstance(index, tuple) else (index,)
        place = (self._rows[first], *others)
        return self._loaded[place]


class _Transposed:
    """A matrix with rows and columns exchanged."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self.shape = tuple(loaded.shape)[::-1]

    def __getitem__(self, index: Any) -> torch.Tensor:
        given = index if isinstance(index, tuple) else (index,)
        rows, columns = (*given, slice(None))[:2]
        place = columns, rows
        return self._loaded[place].t()


class Ordered(LinearBase):
    """A linear layer with a weight that files store in `order`."""

    def __init__(self, order: FileOrder, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.order = order
        if not self.weight_format.is_plain:
            raise ValueError(
                "quantized weights that are transposed, or have heads in groups, are not supported"
            )

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        super().weight_loader(param, self.order.view(loaded, shard_id), shard_id)

    def whole_shape(self, param: nn.Parameter, shard_id: int | None) -> tuple[int, ...]:
        return self.order.shape(super().whole_shape(param, shard_id))


class RowsInTurn:
    """Experts with fused matrices that files only store as stacks, with rows in turn."""

    @staticmethod
    def outputs(num_projections: int, rows: torch.Tensor) -> torch.Tensor:
        """Rows for all outputs: those of the first projection, then those of the next."""
        return torch.cat([rows[i::num_projections] for i in range(num_projections)])


class OrderedQKV(Ordered, QKVParallelLinear):
    """Query, key and value projections in the files' order."""


class OrderedColumns(Ordered, MergedColumnParallelLinear):
    """A linear layer with outputs that ranks split, in the files' order."""


class OrderedRows(Ordered, RowParallelLinear):
    """A linear layer with inputs that ranks split, in the files' order."""


def outputs_of(layer: nn.Module, projections: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
    """Rows for the outputs of some projections of a layer, from the order of files."""
    if isinstance(layer, RowOrdered):
        return layer.outputs(projections, rows)
    if isinstance(layer, Ordered) and len(projections) == len(layer.rank_part.sizes):
        return layer.order.outputs(rows)
    if isinstance(layer, RowsInTurn):
        return layer.outputs(len(projections), rows)
    return rows
