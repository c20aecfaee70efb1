"""Find the tensors inside objects: in a model's modules, matrices and operands."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nanovllm.layers.layer import Layer

PACKAGE = "nanovllm."
# A layer's attributes that `bind` makes.
BOUND = ("matrix", "kernel", "matrices", "operands", "bound_factors")


def children_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes or items of an object of this package, or of a container, by name."""
    if isinstance(value, dict):
        yield from ((str(name), item) for name, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(index), item) for index, item in enumerate(value))
    elif isinstance(value, nn.Module):
        for members in (value._parameters, value._buffers, value._modules):
            yield from members.items()
        yield from ((k, v) for k, v in vars(value).items() if not k.startswith("_"))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    elif type(value).__module__.startswith(PACKAGE) and hasattr(value, "__dict__"):
        yield from vars(value).items()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors that an object reaches, each once."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    left = [value]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found[id(one)] = one
        else:
            left.extend(child for _, child in children_of(one))
    return [*found.values()]


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    """The tensors that loading fills: the layers' parameters, and what `bind` makes of them."""
    found: list[torch.Tensor] = [*model.parameters()]
    for layer in model.modules():
        if isinstance(layer, Layer):
            found += tensors_in([getattr(layer, name, None) for name in BOUND])
    return [*{id(tensor): tensor for tensor in found}.values()]


def refresh(model: nn.Module) -> None:
    """Let layers that keep something computed from their weights compute it again."""
    for layer in model.modules():
        if compute := getattr(layer, "refresh", None):
            compute()


def slots_of(model: nn.Module) -> list[torch.Tensor]:
    """The memory for adapters that layers have: all zeros if no slot has one."""
    names = ("low_rank", "low_ranks")
    return tensors_in([getattr(each, name, None) for each in model.modules() for name in names])


def holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether a type has all values of another floating-point type, or is the same."""
    widths = {torch.float16: 0, torch.bfloat16: 0, torch.float32: 1, torch.float64: 2}
    return dtype == other or widths.get(dtype, -1) > widths.get(other, 9)


def replace_values(old: Any, new: Any, name: str) -> None:
    """Copy the values of `new`, of the same structure, into the memory of `old`."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        if old.shape != new.shape or not holds(old.dtype, new.dtype):
            raise ValueError(
                f"{name}: the new weights need another layout ({new.dtype}, {tuple(new.shape)})"
                f" than the old ones ({old.dtype}, {tuple(old.shape)}), for which steps were"
                " compiled; make a new engine with them"
            )
        old.copy_(new)
        return
    mine, others = dict(children_of(old)), dict(children_of(new))
    differs = isinstance(old, int | float | str | None) and old != new
    if type(old) is not type(new) or mine.keys() != others.keys() or differs:
        raise ValueError(
            f"{name}: the new weights need another layout than the old ones, for which steps were"
            " compiled; make a new engine with them"
        )
    for key, child in mine.items():
        replace_values(child, others[key], name)
