"""Stored tensors: how the tensors of a checkpoint describe a matrix, and which part a rank holds.

A tensor has axes. Along one, an element belongs to a number of rows or columns of the matrix: to
one for plain weights, to 128 for scales of blocks, to 8 for 4-bit codes packed into 32 bits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from nanovllm.layers.layer import Loaded, copy_into


class Axis(NamedTuple):
    """A dimension of a stored tensor: an element belongs to `unit` rows (or columns)."""

    of_rows: bool
    unit: int = 1

    def units(self, part: slice) -> slice:
        """The elements that the rows or columns `part` need, or share with others."""
        return slice(part.start // self.unit, -(-part.stop // self.unit))


@dataclass(frozen=True)
class Stored:
    """A tensor that describes a matrix. An int axis has that size in every matrix.

    A tensor without an axis of rows is stored once for each projection of a fused layer.
    """

    axes: tuple[Axis | int, ...]
    dtype: torch.dtype | None = None  # None: that of the model

    @property
    def rows_dim(self) -> int | None:
        """The dimension that the projections of a fused layer divide, if there is one."""
        dims = (i for i, a in enumerate(self.axes) if isinstance(a, Axis) and a.of_rows)
        return next(dims, None)

    def index(self, rows: slice, columns: slice) -> tuple[slice, ...]:
        """Which elements belong to these rows and columns of the matrix."""
        parts = {True: rows, False: columns}
        return tuple(
            axis.units(parts[axis.of_rows]) if isinstance(axis, Axis) else slice(0, axis)
            for axis in self.axes
        )

    def shape(self, num_rows: int, num_columns: int) -> tuple[int, ...]:
        """The shape of the tensor for a matrix of this size."""
        index = self.index(slice(0, num_rows), slice(0, num_columns))
        return tuple(part.stop for part in index)


@dataclass(frozen=True)
class Held:
    """The part of a layer's matrix that a rank holds.

    The matrix has the rows of one or more projections; `sizes` are their numbers, of which the rank
    holds `rows`. Of all it holds the `columns` of `in_features`.
    """

    sizes: tuple[int, ...]
    rows: tuple[slice, ...]
    in_features: int
    columns: slice

    @classmethod
    def whole(cls, out_features: int, in_features: int) -> "Held":
        """All of a matrix."""
        return cls((out_features,), (slice(0, out_features),), in_features, slice(0, in_features))

    @property
    def num_rows(self) -> int:
        """Rows of this rank's matrix."""
        return sum(_size(part) for part in self.rows)

    @property
    def num_columns(self) -> int:
        """Columns of this rank's matrix."""
        return _size(self.columns)

    def shape(self, stored: Stored) -> tuple[int, ...]:
        """The shape of this rank's tensor: the projections' tensors, joined in their rows.

        Those without rows are stacked.
        """
        shapes = [tuple(map(_size, stored.index(rows, self.columns))) for rows in self.rows]
        dim = stored.rows_dim
        if dim is None:
            return (len(shapes), *shapes[0])
        return (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])

    def new(self, stored: Stored, stack: tuple[int, ...] = ()) -> "StoredTensor":
        """A parameter for this rank's tensor, or for a stack of them; it is not filled yet."""
        param = StoredTensor(
            torch.empty((*stack, *self.shape(stored)), dtype=stored.dtype), requires_grad=False
        )
        param.stored, param.held = stored, self
        return param

    def split(self, stored: Stored, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of the projections in this rank's tensor, or in a stack of them."""
        dim = stored.rows_dim
        if dim is None:
            return tensor.unbind(-1 - len(stored.axes))
        sizes = [index[dim] for index in (stored.index(r, self.columns) for r in self.rows)]
        from_end = dim - len(stored.axes)
        return torch.split(tensor, list(map(_size, sizes)), from_end)

    def load(
        self,
        stored: Stored,
        target: torch.Tensor,
        loaded: Loaded,
        projection: int | None,
        stack: tuple[int, slice] | None = None,
    ) -> None:
        """Fill a projection's part of `target`, or all if the checkpoint has them as one tensor.

        With `stack`, the checkpoint's tensor is a stack of so many, of which a slice is held.
        """
        chosen = range(len(self.sizes)) if projection is None else [projection]
        parts = self.split(stored, target)
        whole = stored.shape(sum(self.sizes[i] for i in chosen), self.in_features)
        above = () if stack is None else (stack[0],)
        first = 0
        for i in chosen:
            rows = slice(first + self.rows[i].start, first + self.rows[i].stop)
            index = stored.index(rows, self.columns)
            if stack is not None:
                index = (stack[1], *index)
            copy_into(parts[i], loaded, (*above, *whole), index)
            first += self.sizes[i]


class StoredTensor(nn.Parameter):
    """A parameter that has this rank's part of a stored tensor, or of a stack of them."""

    stored: Stored
    held: Held


def _size(part: slice) -> int:
    size: int = part.stop - part.start
    return size
