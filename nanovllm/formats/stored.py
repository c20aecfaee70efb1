"""Stored: a checkpoint's tensor that describes a matrix. RankPart: a rank's part of the matrix.

A tensor has axes. Along an axis, each element belongs to a number of rows or columns of the matrix:
1 for plain weights, 128 for scales of blocks, 8 for 4-bit codes packed into 32 bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

WHOLE = slice(None)

# Fills the tensor of a matrix [N, K], or a stack of them; the second argument is (N, K).
Fill = Callable[[torch.Tensor, tuple[int, int], torch.Generator], object]


class Loaded(Protocol):
    """A checkpoint's tensor, in memory or in a file. In a file, only the indexed part is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, index: Any) -> torch.Tensor: ...


def check_shape(loaded: Loaded, shape: tuple[int, ...]) -> None:
    """Raise a ValueError if the tensor has another shape. Reads no data."""
    if tuple(loaded.shape) != shape:
        raise ValueError(f"shape {tuple(loaded.shape)}, the model needs {shape}")


def copy_into(
    target: torch.Tensor, loaded: Loaded, shape: tuple[int, ...], index: tuple[slice, ...]
) -> None:
    """Copy the part `index` of a checkpoint's tensor, which must have the shape `shape`."""
    check_shape(loaded, shape)
    target.copy_(loaded[index])


def copy_whole(param: torch.Tensor, loaded: Loaded) -> None:
    """Copy a checkpoint's tensor into a parameter that every rank has whole."""
    copy_into(param, loaded, tuple(param.shape), (WHOLE,) * param.dim())


class Axis(NamedTuple):
    """A dimension of a stored tensor: an element belongs to `unit` rows (or columns).

    Every rank has all elements of an axis that is `whole`.
    """

    of_rows: bool
    unit: int = 1
    whole: bool = False

    def units(self, part: slice, size: int) -> slice:
        """The elements that belong, in part or in full, to the rows or columns `part` of `size`."""
        if self.whole:
            part = slice(0, size)
        return slice(part.start // self.unit, -(-part.stop // self.unit))


ROWS, COLUMNS = Axis(of_rows=True), Axis(of_rows=False)


@dataclass(frozen=True)
class Stored:
    """A tensor that describes a matrix. An int axis has that size in every matrix.

    A tensor without an axis of rows is stored once for each projection of a fused layer. A tensor
    with a `projection` describes only that projection. `fill` makes random values for it.
    """

    axes: tuple[Axis | int, ...]
    dtype: torch.dtype | None = None  # None: that of the model
    projection: int | None = None
    fill: Fill | None = None  # None: random plain weights

    @property
    def rows_dim(self) -> int | None:
        """The dimension that the projections of a fused layer divide, if there is one."""
        dims = (i for i, a in enumerate(self.axes) if isinstance(a, Axis) and a.of_rows)
        return next(dims, None)

    @property
    def row_unit(self) -> int:
        """The number of rows that an element belongs to; 1 if the tensor has no axis of rows."""
        return max((a.unit for a in self.axes if isinstance(a, Axis) and a.of_rows), default=1)

    def index(self, rows: slice, columns: slice, size: tuple[int, int]) -> tuple[slice, ...]:
        """The elements that belong to these rows and columns of a matrix [N, K] = `size`."""
        return tuple(
            slice(0, axis) if isinstance(axis, int)
            else axis.units(rows, size[0]) if axis.of_rows
            else axis.units(columns, size[1])
            for axis in self.axes
        )  # fmt: skip

    def spelt(self, loaded: Loaded) -> Loaded:
        """The tensor, with a vector of length 1 as a scalar: some files store scalars like that."""
        return loaded[0] if not self.axes and tuple(loaded.shape) == (1,) else loaded

    def shape(self, size: tuple[int, int]) -> tuple[int, ...]:
        """The shape of the tensor for a matrix [N, K] = `size`."""
        return tuple(map(_size, self.index(slice(0, size[0]), slice(0, size[1]), size)))


@dataclass(frozen=True)
class RankPart:
    """The part of a layer's matrix that this rank has.

    The matrix joins the rows of one or more projections. `sizes` has the number of rows of each
    projection, and `rows` says which of them this rank has. Of the `in_features` columns, the rank
    has `columns`. With `is_fused`, the checkpoint has the projections as one tensor; then one block
    may belong to the end of a projection and to the start of the next.
    """

    sizes: tuple[int, ...]
    rows: tuple[slice, ...]
    in_features: int
    columns: slice
    is_fused: bool = False

    @classmethod
    def whole(cls, out_features: int, in_features: int, columns: slice | None = None) -> "RankPart":
        """All rows of a matrix, and all or some of its columns."""
        columns = slice(0, in_features) if columns is None else columns
        return cls((out_features,), (slice(0, out_features),), in_features, columns)

    @property
    def num_rows(self) -> int:
        """Rows of this rank's matrix."""
        return sum(_size(part) for part in self.rows)

    @property
    def num_columns(self) -> int:
        """Columns of this rank's matrix."""
        return _size(self.columns)

    @property
    def stored_rows(self) -> tuple[slice, ...]:
        """The place of each projection's rows in the matrix that the checkpoint describes."""
        return self.rows_in(range(len(self.sizes))) if self.is_fused else self.rows

    def rows_in(self, projections: Sequence[int]) -> tuple[slice, ...]:
        """The place of this rank's rows of some projections in a matrix that joins those."""
        firsts = accumulate((self.sizes[i] for i in projections), initial=0)
        parts = (self.rows[i] for i in projections)
        return tuple(
            slice(first + part.start, first + part.stop)
            for first, part in zip(firsts, parts, strict=False)
        )

    def shape(self, stored: Stored) -> tuple[int, ...]:
        """The shape of this rank's tensor: the projections' tensors, joined along their rows.

        Tensors without rows are stacked.
        """
        shapes = [tuple(map(_size, self._index(stored, i))) for i in self.projections(stored)]
        dim = stored.rows_dim
        if dim is None:
            return (len(shapes), *shapes[0])
        return (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])

    def new(self, stored: Stored, stack: tuple[int, ...] = ()) -> "StoredTensor":
        """A parameter for this rank's tensor, or for a stack of them; it is not filled yet."""
        param = StoredTensor(
            torch.empty((*stack, *self.shape(stored)), dtype=stored.dtype), requires_grad=False
        )
        param.stored, param.rank_part = stored, self
        return param

    def split(self, stored: Stored, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of the projections in this rank's tensor, or in a stack of them."""
        dim = stored.rows_dim
        if dim is None:
            return tensor.unbind(-1 - len(stored.axes))
        sizes = [_size(self._index(stored, i)[dim]) for i in self.projections(stored)]
        return torch.split(tensor, sizes, dim - len(stored.axes))

    def projections(self, stored: Stored, projection: int | None = None) -> Sequence[int]:
        """The projections that the tensor describes, or the given one."""
        if projection is None:
            projection = stored.projection
        return range(len(self.sizes)) if projection is None else [projection]

    def stored_size(self, stored: Stored, projection: int | None = None) -> tuple[int, int]:
        """The size [N, K] of the matrix that a checkpoint's tensor describes."""
        rows = sum(self.sizes[i] for i in self.projections(stored, projection))
        return rows, self.in_features

    def only(self, projection: int) -> "RankPart":
        """The rank's part of one projection."""
        size = sum(self.sizes) if self.is_fused else self.sizes[projection]
        return RankPart((size,), (self.stored_rows[projection],), self.in_features, self.columns)

    def _index(self, stored: Stored, projection: int) -> tuple[slice, ...]:
        """The rank's elements of a projection's tensor, or of the fused one."""
        size = self.sizes[projection], self.in_features
        return stored.index(self.stored_rows[projection], self.columns, size)

    def load(
        self,
        stored: Stored,
        target: torch.Tensor,
        loaded: Loaded,
        projection: int | None,
    ) -> None:
        """Fill a projection's part of `target`, or all if the checkpoint has them as one tensor."""
        described = self.projections(stored)
        chosen = self.projections(stored, projection)
        parts = dict(zip(described, self.split(stored, target), strict=True))
        loaded, shape = stored.spelt(loaded), stored.shape(self.stored_size(stored, projection))
        for i, rows in zip(chosen, self.rows_in(chosen), strict=True):
            if (rows.start - self.stored_rows[i].start) % stored.row_unit:
                raise ValueError(
                    f"blocks of {stored.row_unit} rows that do not begin where those of the codes"
                    f" do: projections of {self.sizes} rows are fused in only one of the two"
                )
            size = self.sizes[i], self.in_features
            copy_into(parts[i], loaded, shape, stored.index(rows, self.columns, size))


class StoredTensor(nn.Parameter):
    """A parameter with this rank's part of a stored tensor, or of a stack of them."""

    stored: Stored
    rank_part: RankPart

    def whole_shape(self, projection: int | None = None) -> tuple[int, ...]:
        """The shape of a checkpoint's tensor for all ranks, of all projections or of one."""
        part = self.rank_part
        stack = self.shape[: self.dim() - len(part.shape(self.stored))]
        return (*stack, *self.stored.shape(part.stored_size(self.stored, projection)))


def _size(part: slice) -> int:
    size: int = part.stop - part.start
    return size
