"""The matrices of `LatentExpansion`, one for each head."""

import torch

from nanovllm.formats.format import DenseMatrix, Matrix
from nanovllm.kernels.table import PLAIN, Kernels


class HeadMatrices(Matrix):
    """The parts of each head, `keys` [H, plain, rank] and `values` [H, rank, value], contiguous.

    With 16-bit weights on a CPU, products with transposed ones take several times as long.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, kernels: Kernels = PLAIN) -> None:
        """Of weights [H, plain, rank] and [H, value, rank]."""
        self._kernels = kernels
        self.keys, self.values = keys.contiguous(), values.mT.contiguous()

    def fold(self, queries: torch.Tensor, out: torch.Tensor) -> None:
        """As that of the layer, without adapters."""
        self._kernels.heads_linear(queries, self.keys, out)

    def unfold(self, sums: torch.Tensor) -> torch.Tensor:
        """As that of the layer, without adapters."""
        return self._kernels.heads_linear(sums, self.values)

    def plain(self) -> torch.Tensor:
        return torch.cat([self.keys, self.values.mT], 1).flatten(0, 1)

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Keys and values themselves, which attention does not need. It copies the weight."""
        return DenseMatrix(self.plain()).linear(x, bias, out)
