"""The forms of a weight that layers multiply by; each device has a fastest one."""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.formats.format import LayerWeight, Weight
from nanovllm.kernels.table import Kernels, Rounding


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
        return _to(out, F.linear(x, self.operand, bias))


class PackedMatrix(Matrix):
    """A copy of a tensor in oneDNN's blocked layout, on the CPU."""

    def __init__(self, weight: torch.Tensor) -> None:
        from nanovllm.kernels.cpu.packed_linear import pack, packed_linear

        self.packed, self._linear = pack(weight), packed_linear

    def plain(self) -> torch.Tensor:
        return self.packed.to_dense()

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return _to(out, self._linear(x, self.packed, bias))


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
        return _to(out, self.kernels.arranged_linear(x, self.operand, bias))


class EmptyMatrix(Matrix):
    """A weight without rows, which kernels do not accept: of a rank that has no tokens' logits."""

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert bias is None or not len(bias)
        return _to(out, x.new_empty(len(x), 0))


class JoinedMatrix(Matrix):
    """The matrices of projections that have no common form: one product for each.

    `sizes` are the numbers of their rows.
    """

    def __init__(self, matrices: list[Matrix], sizes: list[int]) -> None:
        self.matrices, self.sizes = matrices, sizes

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        biases = [None] * len(self.sizes) if bias is None else torch.split(bias, self.sizes)
        parts = zip(self.matrices, biases, strict=True)
        return _to(out, torch.cat([matrix.linear(x, part) for matrix, part in parts], dim=1))


def _to(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    return result if out is None else out.copy_(result)


def _num_rows(weight: Weight) -> int:
    return len(weight if isinstance(weight, torch.Tensor) else weight.codes)


def matrix_of(weight: LayerWeight, kernels: Kernels) -> Matrix:
    """The fastest form of a weight [N, K] here. Peak memory: up to three times the weight."""
    if isinstance(weight, list):
        return JoinedMatrix([matrix_of(w, kernels) for w in weight], [_num_rows(w) for w in weight])
    if not _num_rows(weight):
        return EmptyMatrix()
    if not isinstance(weight, torch.Tensor):
        return KernelMatrix(kernels.arrange(weight), kernels)
    if not weight.numel():
        return DenseMatrix(weight)
    if (operand := kernels.arrange_plain(weight)) is not None:
        return KernelMatrix(operand, kernels)
    if not kernels.reads_plain and weight.device.type == "cpu":
        from nanovllm.kernels.cpu.packed_linear import can_pack

        if can_pack(weight):
            return PackedMatrix(weight)
    return DenseMatrix(weight)
