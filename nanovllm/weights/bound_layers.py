"""What a layer keeps of a parameter when kernels may have layouts of their own."""

from typing import Any, TypeGuard

import torch

from nanovllm.formats.format import Dense, DenseMatrix, Matrix
from nanovllm.formats.stored import StoredTensor
from nanovllm.layers.experts import Experts
from nanovllm.layers.layer import Layer
from nanovllm.layers.linear import LinearBase


def kept(layer: Layer, name: str) -> torch.Tensor | None:
    """The memory of the parameter `name`, bound or not, as `weight_loader` fills it.

    None if the layer has another layout for its kernels.
    """
    operand: Any = None
    if isinstance(layer, Experts) and isinstance(layer.formats.get(name), Dense) and layer.operands:
        operand = layer.operands[[*layer.rank_parts].index(name)]
    elif _is_plain(layer, name) and isinstance(layer.matrix, DenseMatrix):
        operand = layer.matrix.operand
    return layer._parameters.get(name) if operand is None else operand


def unpacked(layer: Layer, name: str) -> torch.Tensor | None:
    """The parameter `name` as it was before `bind`; None if that is lost.

    For parameters that are not `kept`. A copy, except of a head's table that kernels read where it
    is: a change of that is one of the weight.
    """
    matrices: list[Matrix] = []
    if isinstance(layer, Experts) and isinstance(layer.formats.get(name), Dense):
        of_experts = layer.matrices or ([], [])
        matrices = of_experts[[*layer.rank_parts].index(name)]
    elif _is_plain(layer, name) and layer.matrix is not None:
        return layer.matrix.plain()
    plain = [matrix.plain() for matrix in matrices]
    there = [matrix for matrix in plain if matrix is not None]
    return torch.stack(there) if there and len(there) == len(plain) else None


def alias_of(param: StoredTensor, memory: torch.Tensor) -> StoredTensor:
    """A parameter with this memory, for the same part of the weight as `param`."""
    alias = StoredTensor(memory.data, requires_grad=False)
    alias.stored, alias.rank_part = param.stored, param.rank_part
    return alias


def _is_plain(layer: Layer, name: str) -> TypeGuard[LinearBase]:
    """Whether a layer is linear, with plain weights of this name."""
    is_linear = isinstance(layer, LinearBase) and isinstance(layer.weight_format, Dense)
    return is_linear and name == "weight"
