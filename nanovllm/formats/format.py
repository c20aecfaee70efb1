"""WeightFormat: which tensors of a checkpoint describe a matrix, and what matrix that is."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from nanovllm.formats.scheme import Scheme
from nanovllm.formats.stored import Axis, Held, Stored
from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix

ROWS, COLUMNS = Axis(of_rows=True), Axis(of_rows=False)
OF_PROJECTION = "_of_projection_"
Weight = torch.Tensor | QuantizedMatrix  # what kernels multiply by


class WeightFormat(ABC):
    """How a layer's matrices are stored. A format has no state: layers have the tensors.

    `quantize`, if there is one, makes the tensors of a plain matrix [N, K]: then the checkpoint has
    a plain `weight`, of which a layer keeps only those. `is_fused` says that the checkpoint has the
    projections of a fused layer as one tensor, with blocks counted from the start of the first.
    """

    is_fused = False
    quantize: Callable[[torch.Tensor], dict[str, torch.Tensor]] | None = None
    scheme: Scheme | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the checkpoint has plain weights."""
        return self.scheme is None or self.quantize is not None

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, Stored]:
        """The tensors of a matrix by name. A checkpoint in this format has them by these names."""

    @abstractmethod
    def weight(self, tensors: Mapping[str, torch.Tensor], held: Held) -> Weight | list[Weight]:
        """A rank's matrix [N, K], made of its parts of the tensors.

        If no single matrix can describe all projections, a list with one for each of them.
        """


class Dense(WeightFormat):
    """Weights of the model's type, or of `dtype`."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._tensors = {"weight": Stored((ROWS, COLUMNS), dtype)}

    @property
    def tensors(self) -> Mapping[str, Stored]:
        return self._tensors

    def weight(self, tensors: Mapping[str, torch.Tensor], held: Held) -> torch.Tensor:  # noqa: ARG002
        return tensors["weight"]


class PerProjection(WeightFormat):
    """A format for each projection of a fused layer, where a checkpoint treats them differently."""

    def __init__(self, formats: Sequence[WeightFormat]) -> None:
        self.formats = formats
        self._tensors = {
            f"{name}{OF_PROJECTION}{i}": replace(stored, projection=i)
            for i, each in enumerate(formats)
            for name, stored in each.tensors.items()
        }

    @property
    def tensors(self) -> Mapping[str, Stored]:
        return self._tensors

    def weight(self, tensors: Mapping[str, torch.Tensor], held: Held) -> list[Weight]:
        weights = []
        for i, each in enumerate(self.formats):
            own = {name: tensors[f"{name}{OF_PROJECTION}{i}"] for name in each.tensors}
            weight = each.weight(own, held.only(i))
            weights += weight if isinstance(weight, list) else [weight]
        return weights


class Float32(WeightFormat):
    """Weights of any format, dequantized to float32: for routers, where rounding decides."""

    def __init__(self, stored_as: WeightFormat) -> None:
        self.stored_as = stored_as

    @property
    def tensors(self) -> Mapping[str, Stored]:
        return self.stored_as.tensors

    def weight(self, tensors: Mapping[str, torch.Tensor], held: Held) -> torch.Tensor:
        return dense(self.stored_as.weight(tensors, held), held.num_columns, torch.float32)


def dense(weight: Weight | list[Weight], size_in: int, dtype: torch.dtype) -> torch.Tensor:
    """A layer's weight as a plain matrix, with columns in the order of its inputs."""
    if isinstance(weight, list):
        return torch.cat([dense(part, size_in, dtype) for part in weight])
    if isinstance(weight, torch.Tensor):
        return weight.to(dtype)
    from nanovllm.kernels.plain.quantized_linear import dense_matrix

    return dense_matrix(weight, size_in).to(dtype)


def check_scales(name: str, scales: torch.Tensor, of_inputs: bool = False) -> torch.Tensor:
    """Return the scales if they are finite, and above 0 if inputs are divided by them. Syncs."""
    low_and_high = torch.stack(scales.aminmax()).tolist() if scales.numel() else []  # or NaN
    for scale in low_and_high:
        if not math.isfinite(scale) or (of_inputs and scale <= 0):
            allowed = "finite and above 0" if of_inputs else "finite"
            raise ValueError(f"{name} must be {allowed}, got {scale}")
    return scales


def tensor_of(param: str) -> tuple[str, int | None]:
    """A parameter's name in the checkpoint, and its projection if it describes only one."""
    name, _, projection = param.partition(OF_PROJECTION)
    return name, int(projection) if projection else None


DENSE = Dense()
