"""Matrix: a weight in the form that a layer multiplies by. Here are the forms of plain weights.

`layouts.py` has the others; `matrix_of` in `layers/linear.py` chooses the fastest form.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.kernels.table import Rounding


class Matrix(ABC):
    """A weight [N, K].

    `operand` is for kernels that fuse other operations with the product. It is None if there are no
    such kernels for this form.
    """

    operand: Any = None

    def rounding(self, x: torch.Tensor) -> Rounding | None:  # noqa: ARG002
        """The rounding of len(x) rows, which the kernel before `linear` can do, or None."""
        return None

    def plain(self) -> torch.Tensor | None:
        """The weight [N, K] that this was made of, if it was a plain one and can be restored."""
        return None

    @abstractmethod
    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x @ weight.T + bias` for x [T, K], written to `out` if given."""


class DenseMatrix(Matrix):
    """A tensor, multiplied by PyTorch."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.operand = weight

    def plain(self) -> torch.Tensor:
        weight: torch.Tensor = self.operand
        return weight

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if out is not None and bias is None:
            return torch.mm(x, self.operand.t(), out=out)
        return written_to(out, F.linear(x, self.operand, bias))


class PackedMatrix(Matrix):
    """A copy of a tensor in oneDNN's blocked layout, on the CPU."""

    def __init__(self, weight: torch.Tensor) -> None:
        from nanovllm.kernels.plain.packed_linear import pack, packed_linear

        self.packed, self._linear = pack(weight), packed_linear

    def plain(self) -> torch.Tensor:
        return self.packed.to_dense()

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return written_to(out, self._linear(x, self.packed, bias))


def written_to(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    """The result, copied to `out` if that is given."""
    return result if out is None else out.copy_(result)
