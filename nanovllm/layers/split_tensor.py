"""SplitTensor: a parameter of any shape, with an equal part on each rank."""

import torch
from torch import nn

from nanovllm.formats.stored import Loaded, copy_whole
from nanovllm.layers.layer import Layer
from nanovllm.layers.ranks import ALONE, Ranks


class SplitTensor(Layer):
    """A `weight` that has `shape` on all ranks together, split along `dim`."""

    def __init__(self, shape: tuple[int, ...], dim: int = 0, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.shape, self.dim, self.part = shape, dim, ranks.equal_slice(shape[dim])
        here = torch.Size((*shape[:dim], self.part.stop - self.part.start, *shape[dim + 1 :]))
        self.weight = nn.Parameter(torch.empty(here), requires_grad=False)

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill `weight` with this rank's part."""
        assert shard_id is None
        copy_whole(param, loaded[(slice(None),) * self.dim + (self.part,)])

    def whole_shape(self, param: nn.Parameter, shard_id: int | None) -> tuple[int, ...]:  # noqa: ARG002
        """The shape in a checkpoint."""
        return self.shape
