"""Layer: the protocol that the loader and startup use, so that they know no layer by name."""

from typing import Any, Protocol

import torch
from torch import nn

from nanovllm.layers.backend import Backend

WHOLE = slice(None)


class Loaded(Protocol):
    """A tensor, or one in a file, which is read where it is indexed."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, index: Any) -> torch.Tensor: ...


class Layer(nn.Module):
    """A module that knows how its parameters are loaded, and which kernels it calls."""

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill one part of `param` with what this rank holds of a checkpoint's tensor.

        `shard_id` says which part of a fused parameter the tensor is; None is all of it.
        """
        assert shard_id is None
        copy_whole(param, loaded)

    def parts(self, name: str) -> list[str]:  # noqa: ARG002
        """The checkpoint's names, within this layer, for the parts of the parameter `name`.

        `shard_id` counts them. None where the layer's own checkpoint tensor is the only part.
        """
        return []

    def bind(self, backend: Backend) -> None:
        """Take the kernels to call. Called once, when the weights are loaded."""


def check_shape(loaded: Loaded, shape: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape; reads nothing of it."""
    if tuple(loaded.shape) != shape:
        raise ValueError(f"shape {tuple(loaded.shape)}, the model needs {shape}")


def copy_into(
    target: torch.Tensor, loaded: Loaded, shape: tuple[int, ...], index: tuple[slice, ...]
) -> None:
    """Copy the part `index` of a checkpoint's tensor, which must have the very shape `shape`."""
    check_shape(loaded, shape)
    target.copy_(loaded[index])


def copy_whole(param: torch.Tensor, loaded: Loaded) -> None:
    """Copy a checkpoint's tensor into a parameter that every rank holds whole."""
    copy_into(param, loaded, tuple(param.shape), (WHOLE,) * param.dim())
