"""Formats that are made of other formats: one for each projection, and float32 of any."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from nanovllm.formats.format import OF_PROJECTION, LayerWeight, Weight, WeightFormat
from nanovllm.formats.stored import RankPart, Stored
from nanovllm.kernels.operands.block_matrix import BlockMatrix
from nanovllm.kernels.plain.dequantize_blocks import dequantize
from nanovllm.kernels.plain.quantized_linear import dense_matrix


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

    def weight(self, tensors: Mapping[str, torch.Tensor], part: RankPart) -> list[Weight]:
        weights = []
        for i, each in enumerate(self.formats):
            own = {name: tensors[f"{name}{OF_PROJECTION}{i}"] for name in each.tensors}
            weight = each.weight(own, part.only(i))
            weights += weight if isinstance(weight, list) else [weight]
        return weights


class Float32(WeightFormat):
    """Weights of any format, dequantized to float32: for routers, where rounding decides."""

    def __init__(self, stored_as: WeightFormat) -> None:
        self.stored_as = stored_as

    @property
    def tensors(self) -> Mapping[str, Stored]:
        return self.stored_as.tensors

    def weight(self, tensors: Mapping[str, torch.Tensor], part: RankPart) -> torch.Tensor:
        return dense(self.stored_as.weight(tensors, part), part.num_columns, torch.float32)


def dense(weight: LayerWeight, size_in: int, dtype: torch.dtype) -> torch.Tensor:
    """A layer's weight as a plain matrix, with columns in the order of its inputs."""
    if isinstance(weight, list):
        return torch.cat([dense(part, size_in, dtype) for part in weight])
    if isinstance(weight, torch.Tensor):
        return weight.to(dtype)
    if isinstance(weight, BlockMatrix):
        return dequantize(weight.codes, weight.kind).flatten(1).to(dtype)
    return dense_matrix(weight, size_in).to(dtype)
