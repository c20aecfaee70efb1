"""WeightFormat: how a linear layer's weight is stored. Matrix: the form that it is multiplied in.

Here are the plain format and the forms of plain weights, with which the engine runs alone. When a
model is quantized, `choice.py` loads the other formats. `layouts.py` has the other forms.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.formats.names import USUAL_NAMES, Names
from nanovllm.formats.stored import COLUMNS, ROWS, Loaded, RankPart, Stored, StoredTensor
from nanovllm.kernels.table import Rounding

if TYPE_CHECKING:
    from nanovllm.formats.scheme import Scheme
    from nanovllm.kernels.operands.block_matrix import BlockMatrix
    from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix

OF_PROJECTION = "_of_projection_"
Weight: TypeAlias = "torch.Tensor | QuantizedMatrix | BlockMatrix"  # what kernels multiply by
LayerWeight: TypeAlias = "Weight | list[Weight]"  # one matrix, or one for each projection
Rename = Callable[[str], str]  # from a tensor's name in the format to its name in the layer


def as_it_is(name: str) -> str:
    """The name of a tensor in a layer of one matrix."""
    return name


class WeightFormat(ABC):
    """How a layer's matrices are stored. A format has no state: layers have the tensors.

    The tensors are parameters of the layer, which a checkpoint fills. They are dropped once the
    layer has its matrix. `is_fused` says that the checkpoint has the projections of a fused layer
    as one tensor; blocks are then counted from the start of the first projection.
    """

    is_fused = False
    scheme: "Scheme | None" = None  # of quantized weights

    @property
    def is_plain(self) -> bool:
        """Whether the checkpoint has plain weights."""
        return self.scheme is None

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, Stored]:
        """The tensors of a matrix, by their names in a checkpoint of this format."""

    @abstractmethod
    def weight(self, tensors: Mapping[str, torch.Tensor], part: RankPart) -> LayerWeight:
        """A rank's matrix [N, K], made of its parts of the tensors.

        It is a list of one matrix for each projection if they cannot be joined to one.
        """

    @property
    def filled(self) -> list[str]:
        """The names, in the format, of the parameters that a checkpoint fills."""
        return [*self.tensors]

    def register(
        self, layer: nn.Module, part: RankPart, stack: tuple[int, ...] = (),
        rename: Rename = as_it_is,
    ) -> RankPart:  # fmt: skip
        """Register the tensors of a matrix, or of a stack of them, in the layer.

        Returns the part, which then says whether the format has the projections as one tensor.
        """
        part = replace(part, is_fused=self.is_fused)
        for name, stored in self.tensors.items():
            layer.register_parameter(rename(name), part.new(stored, stack))
        return part

    def registered(self, layer: nn.Module, rename: Rename = as_it_is) -> dict[str, torch.Tensor]:
        """The layer's tensors by their names in the format."""
        return {name: getattr(layer, rename(name)) for name in self.tensors}

    def drop(self, layer: nn.Module, rename: Rename = as_it_is) -> None:
        """Free the tensors, which are not needed once the layer has a matrix."""
        for name in self.tensors:
            setattr(layer, rename(name), None)

    def load(
        self,
        param: StoredTensor,
        target: torch.Tensor,
        loaded: Loaded,
        projection: int | None,
        tensors: Mapping[str, torch.Tensor],  # noqa: ARG002
    ) -> None:
        """Fill a projection's part of `target`: the parameter, or one element of its stack.

        `tensors` are the `registered` tensors, or one element of each of their stacks.
        """
        try:
            param.rank_part.load(param.stored, target, loaded, projection)
        except ValueError as error:
            if self.scheme is None:
                raise
            raise ValueError(f"{error} for {self.scheme.description}") from None

    def of_plain(self, matrix: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The tensors of a plain matrix [N, K], for formats that are plain in checkpoints."""
        return {"weight": matrix}


class Dense(WeightFormat):
    """Weights of the model's type, or of `dtype`."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._tensors = {"weight": Stored((ROWS, COLUMNS), dtype)}

    @property
    def tensors(self) -> Mapping[str, Stored]:
        return self._tensors

    def weight(self, tensors: Mapping[str, torch.Tensor], part: RankPart) -> torch.Tensor:  # noqa: ARG002
        return tensors["weight"]


DENSE = Dense()


class Matrix(ABC):
    """A weight [N, K].

    Kernels that fuse other operations with the product read `operand`; None if there are no such
    kernels for this form.
    """

    operand: Any = None

    def rounding(self, x: torch.Tensor) -> Rounding | None:  # noqa: ARG002
        """How the kernel before `linear` may round len(x) rows; None if it must not round."""
        return None

    def plain(self) -> torch.Tensor | None:
        """The plain weight [N, K] that this was made of; None if it cannot be restored."""
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


@dataclass(frozen=True)
class Formats:
    """Chooses the format of each layer inside a module. Here, all weights are plain."""

    names: Names = USUAL_NAMES

    def inside(self, name: str) -> "Formats":  # noqa: ARG002
        """The formats of a module's layers."""
        return self

    def of(self, layer: str) -> WeightFormat:  # noqa: ARG002
        """The format of a linear layer."""
        return DENSE

    def of_table(self, layer: str) -> WeightFormat:  # noqa: ARG002
        """The format of an embedding's table."""
        return DENSE

    def in_float32(self, layer: str) -> WeightFormat:  # noqa: ARG002
        """The format of a small layer that is multiplied in float32."""
        return Dense(torch.float32)

    def of_experts(self, num_experts: int) -> Mapping[str, WeightFormat]:  # noqa: ARG002
        """The formats of the experts' matrices; all experts have the same."""
        return dict.fromkeys(self.names.experts, DENSE)

    def has_kv_scales(self) -> bool:
        """Whether the files have scales for a quantized KV cache in this module."""
        return False


PLAIN_FORMATS = Formats()


def tensor_of(param: str) -> tuple[str, int | None]:
    """A parameter's name in the checkpoint, and the projection that it describes; None for all."""
    name, _, projection = param.partition(OF_PROJECTION)
    return name, int(projection) if projection else None
