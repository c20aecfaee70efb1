"""The matrices of `LatentExpansion` on a CPU, in one order of sums for any number of tokens.

PyTorch's products of few tokens have another order. In float32 they are faster for many.
"""

from typing import Any

import torch

from nanovllm.kernels.cpu.heads_linear import TiledHeads
from nanovllm.kernels.table import Kernels
from nanovllm.layers.head_matrices import HeadMatrices


class TiledHeadMatrices(HeadMatrices):
    """As `HeadMatrices`, in tiles."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, kernels: Kernels) -> None:
        """Of matrices [H, plain, rank] and [H, rank, value]."""
        self._kernels = kernels
        self._keys, self._values = (
            TiledHeads([kernels.arrange_plain(each.mT) for each in heads])
            for heads in (keys, values)
        )

    def fold(self, queries: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self._keys.linear(queries))

    def unfold(self, sums: torch.Tensor) -> torch.Tensor:
        return self._values.linear(sums)

    def plain(self) -> torch.Tensor:
        plain_of: Any = self._kernels.plain_of
        keys, values = (
            torch.stack([plain_of(each) for each in heads.matrices])
            for heads in (self._keys, self._values)
        )
        return torch.cat([keys.mT, values], 1).flatten(0, 1)
