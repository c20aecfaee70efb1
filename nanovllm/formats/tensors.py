"""A layer's tensors: those of its weight format, from their registration to the bound matrix.

They are parameters that a checkpoint fills. If the format quantizes plain weights, they are buffers
instead, and the checkpoint fills a `weight` that has no memory: it is quantized into them.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from nanovllm.formats.format import COLUMNS, ROWS, WeightFormat
from nanovllm.formats.loaded import Loaded
from nanovllm.formats.quantize import load_quantized
from nanovllm.formats.stored import Held, Stored, StoredTensor

SOURCE = Stored((ROWS, COLUMNS))  # a plain weight that is quantized
Rename = Callable[[str], str]  # from a tensor's name in the format to its name in the layer


def as_it_is(name: str) -> str:
    """The name of a tensor in a layer of one matrix."""
    return name


def register_tensors(
    layer: nn.Module,
    weight_format: WeightFormat,
    held: Held,
    stack: tuple[int, ...] = (),
    rename: Rename = as_it_is,
) -> Held:
    """Register the tensors of a matrix, or of a stack of them, in the layer.

    Returns the part held, which says whether the format has the projections as one tensor.
    """
    held = replace(held, is_fused=weight_format.is_fused)
    for name, stored in weight_format.tensors.items():
        tensor = held.new(stored, stack)
        if weight_format.quantize:
            layer.register_buffer(_quantized(rename(name)), tensor.data)
        else:
            layer.register_parameter(rename(name), tensor)
    if weight_format.quantize:
        with torch.device("meta"):
            layer.register_parameter(rename("weight"), held.new(SOURCE, stack))
    return held


def tensors_of(
    layer: nn.Module, weight_format: WeightFormat, rename: Rename = as_it_is
) -> dict[str, torch.Tensor]:
    """The tensors by their names in the format."""
    kept = _quantized if weight_format.quantize else as_it_is
    return {name: getattr(layer, kept(rename(name))) for name in weight_format.tensors}


def drop_tensors(layer: nn.Module, weight_format: WeightFormat, rename: Rename = as_it_is) -> None:
    """Free the tensors, which are not needed once the layer has a matrix."""
    kept = _quantized if weight_format.quantize else as_it_is
    for name in ["weight"] if weight_format.quantize else []:
        setattr(layer, rename(name), None)
    for name in weight_format.tensors:
        setattr(layer, kept(rename(name)), None)


def load_tensor(
    param: StoredTensor,
    target: torch.Tensor,
    loaded: Loaded,
    projection: int | None,
    weight_format: WeightFormat,
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Fill a projection's part of `target`, which is the parameter, or one of its stack.

    A plain weight is quantized into `tensors` instead, if the format does.
    """
    if param.stored is SOURCE:
        load_quantized(weight_format, tensors, param.held, loaded, projection)
        return
    try:
        param.held.load(param.stored, target, loaded, projection)
    except ValueError as error:
        if weight_format.scheme is None:
            raise
        raise ValueError(f"{error} for {weight_format.scheme.description}") from None


def _quantized(name: str) -> str:
    return f"quantized_{name}"
