"""WeightFormat: which tensors of a checkpoint describe a matrix, and what matrix that is."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from nanovllm.kernels.quantized import QuantizedMatrix
from nanovllm.layers.weights.stored import Axis, Held, Stored

ROWS, COLUMNS = Axis(of_rows=True), Axis(of_rows=False)
Weight = torch.Tensor | QuantizedMatrix  # what kernels multiply by


class WeightFormat(ABC):
    """How a checkpoint stores the matrices of a layer. It has no state: layers have the tensors."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, Stored]:
        """The tensors of a matrix, by their names in the checkpoint's module."""

    @abstractmethod
    def weight(self, tensors: Mapping[str, torch.Tensor], held: Held) -> Weight:
        """The matrix [N, K] of a rank that holds these parts of the tensors, or a stack of them."""


class Dense(WeightFormat):
    """Weights of the model's type, or of `dtype`."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._tensors = {"weight": Stored((ROWS, COLUMNS), dtype)}

    @property
    def tensors(self) -> Mapping[str, Stored]:
        return self._tensors

    def weight(self, tensors: Mapping[str, torch.Tensor], held: Held) -> torch.Tensor:  # noqa: ARG002
        return tensors["weight"]


DENSE = Dense()
