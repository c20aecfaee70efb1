"""Forms of layers: what the kernels of their weights are compiled for."""

from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from nanovllm.formats.format import Matrix


def form_of(layer: nn.Module) -> Hashable:
    """A value that is equal for bound layers with weights of the same types and sizes.

    Layers of one class differ where files mix formats, leave some layers unquantized, or have sizes
    for each layer.
    """
    return tuple(
        (type(module), *((name, _form(value)) for name, value in vars(module).items()))
        for module in layer.modules()
    )


def _form(value: Any) -> Hashable:
    """The form of a module's attribute. Numbers and texts count inside of operands alone."""
    if isinstance(value, bool | int | float | str):
        return type(value).__qualname__
    return _form_of_part(value)


def _form_of_part(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, bool | int | str | torch.dtype):
        return value
    if isinstance(value, Mapping):
        return tuple((key, _form_of_part(part)) for key, part in value.items())
    if isinstance(value, list | tuple):
        return type(value), *map(_form_of_part, value)
    if isinstance(value, Matrix):
        return type(value), _form_of_part(vars(value))
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
        return type(value), *(_form_of_part(getattr(value, name, None)) for name in names)
    return type(value).__qualname__
