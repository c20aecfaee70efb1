"""Loaded: a checkpoint's tensor, in memory or in a file, and copies of its parts."""

from typing import Any, Protocol

import torch

WHOLE = slice(None)
DUMMY_DEVIATION = 0.02  # of random weights


class Loaded(Protocol):
    """A tensor in memory, or one in a file, of which only the indexed part is read."""

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
    """Copy the part `index` of a checkpoint's tensor, whose whole shape must be `shape`."""
    check_shape(loaded, shape)
    target.copy_(loaded[index])


def copy_whole(param: torch.Tensor, loaded: Loaded) -> None:
    """Copy a checkpoint's tensor into a parameter that every rank holds whole."""
    copy_into(param, loaded, tuple(param.shape), (WHOLE,) * param.dim())
