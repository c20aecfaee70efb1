"""The matrices of `LatentExpansion`, one for each head."""

import torch

from nanovllm.formats.format import DenseMatrix, Matrix


class HeadMatrices(Matrix):
    """The parts of each head, `keys` [H, plain, rank] and `values` [H, rank, value], contiguous.

    With 16-bit weights on a CPU, products with transposed ones take several times as long.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Of weights [H, plain, rank] and [H, value, rank]."""
        self.keys, self.values = keys.contiguous(), values.mT.contiguous()

    def fold(self, queries: torch.Tensor, out: torch.Tensor) -> None:
        """As that of the layer, without adapters."""
        torch.bmm(queries.transpose(0, 1), self.keys, out=out.transpose(0, 1))

    def unfold(self, sums: torch.Tensor) -> torch.Tensor:
        """As that of the layer, without adapters."""
        return torch.bmm(sums.transpose(0, 1), self.values).transpose(0, 1)

    def plain(self) -> torch.Tensor:
        return torch.cat([self.keys, self.values.mT], 1).flatten(0, 1)

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Keys and values themselves, which attention does not need. It copies the weight."""
        return DenseMatrix(self.plain()).linear(x, bias, out)
