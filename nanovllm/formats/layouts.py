"""The other forms of weights: in a layout of kernels, of joined projections, without rows."""

from typing import Any

import torch

from nanovllm.formats.format import Matrix, written_to
from nanovllm.kernels.operands.block_matrix import BlockMatrix
from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix
from nanovllm.kernels.table import Kernels, Rounding


class KernelMatrix(Matrix):
    """A weight in the layout of the kernels that multiply by it."""

    def __init__(self, operand: Any, kernels: Kernels) -> None:
        self.operand = operand
        self.kernels = kernels

    def plain(self) -> torch.Tensor | None:
        return self.kernels.plain_of(self.operand)

    def rounding(self, x: torch.Tensor) -> Rounding | None:
        return self.kernels.rounding(self.operand, len(x))

    def linear(
        self, x: Any, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return written_to(out, self.kernels.arranged_linear(x, self.operand, bias))


class BlocksMatrix(Matrix):
    """A weight in the blocks of a GGUF file, in the kernels' order."""

    def __init__(self, weight: BlockMatrix, kernels: Kernels) -> None:
        self.operand = kernels.arrange_blocks(weight)
        self.kernels = kernels

    def rounding(self, x: torch.Tensor) -> Rounding | None:
        return self.kernels.rounding(self.operand, len(x)) if x.itemsize == 2 else None

    def linear(
        self, x: Any, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return written_to(out, self.kernels.block_linear(x, self.operand, bias))

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows with these ids [T], as [T, K]."""
        return self.kernels.block_rows(self.operand, ids, dtype)


def in_layout(weight: QuantizedMatrix | BlockMatrix, kernels: Kernels) -> Matrix:
    """The form of a quantized weight that kernels multiply by."""
    if isinstance(weight, BlockMatrix):
        return BlocksMatrix(weight, kernels)
    return KernelMatrix(kernels.arrange(weight), kernels)


class EmptyMatrix(Matrix):
    """A weight without rows, on a rank that computes no logits. Kernels do not accept it."""

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert bias is None or not len(bias)
        return written_to(out, x.new_empty(len(x), 0))


class JoinedMatrix(Matrix):
    """Projections that cannot be joined to one matrix: there is a product for each.

    `sizes` are the numbers of their rows.
    """

    def __init__(self, matrices: list[Matrix], sizes: list[int]) -> None:
        self.matrices, self.sizes = matrices, sizes

    def rounding(self, x: torch.Tensor) -> Rounding | None:
        """As all of them round, if the same kernels do it."""
        first, *others = (matrix.rounding(x) for matrix in self.matrices)
        return first if all(other is first for other in others) else None

    def linear(
        self, x: Any, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        biases = [None] * len(self.sizes) if bias is None else torch.split(bias, self.sizes)
        parts = zip(self.matrices, biases, strict=True)
        return written_to(out, torch.cat([matrix.linear(x, part) for matrix, part in parts], dim=1))
