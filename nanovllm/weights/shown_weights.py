"""The weights of layers as parameters again, while a function of the caller's looks at the model.

`bind` has replaced them by the kernels' layouts. A weight that kernels read as it is in a
checkpoint is shown itself; of another one, a copy is made when it is first asked for.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nanovllm.layers.layer import Layer
from nanovllm.layers.linear import LinearBase
from nanovllm.weights.bound_layers import kept, unpacked

MOST_NAMES = 4  # in an error


class ShownParameters(dict[str, Any]):
    """The parameters of the layer with this name in the model, with those that `bind` has dropped.

    Of those handed out, `own` have the memory that kernels read, and `copies` have another one.
    """

    def __init__(self, layer_name: str, layer: Layer) -> None:
        super().__init__(layer._parameters)
        self.layer_name, self.layer = layer_name, layer
        self.own, self.copies = dict[str, nn.Parameter](), dict[str, nn.Parameter]()

    def __getitem__(self, name: str) -> Any:
        value = self._shown(name)
        if value is None and self._is_lost(name):
            raise AttributeError(
                f"{type(self.layer).__name__} has its {name} in a layout of the kernels alone;"
                " LLM.weight_shapes has the shapes of the checkpoint's tensors"
            )
        return value

    def __setitem__(self, name: str, _: Any) -> None:
        raise RuntimeError(
            f"{type(self.layer).__name__}: a new {name} would be lost; see LLM.update_weights"
        )

    def items(self) -> Any:
        """The parameters, without those that cannot be shown, and a tied head's, shown before."""
        if getattr(self.layer, "is_tied", False):
            return super().items()
        return {name: self._shown(name) for name in self}.items()

    def values(self) -> Any:
        """The values of `items`."""
        return dict(self.items()).values()

    def lost(self) -> list[str]:
        """The parameters of which the caller has changed what no step reads: a copy, or `.data`."""
        names = []
        for name, own in self.own.items():
            memory = kept(self.layer, name)
            if memory is None or not own.is_set_to(memory):
                names.append(name)
        for name, copy in self.copies.items():
            whole = unpacked(self.layer, name)
            if whole is None or not _are_equal(copy.data, whole):
                names.append(name)
        return [f"{self.layer_name}.{name}" for name in names]

    def _shown(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            value = self.own.get(name, self.copies.get(name))
        if value is not None:
            return value
        if (memory := kept(self.layer, name)) is not None:
            self.own[name] = nn.Parameter(memory.data, requires_grad=False)
            return self.own[name]
        with torch.inference_mode(False), torch.no_grad():
            copy = unpacked(self.layer, name)
            if copy is not None:
                self.copies[name] = nn.Parameter(copy.contiguous(), requires_grad=False)
        return self.copies.get(name)

    def _is_lost(self, name: str) -> bool:
        return isinstance(self.layer, LinearBase) and name in self.layer.weight_format.tensors


def _are_equal(copy: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether all bits are equal, also those of NaNs."""
    if copy.dtype != whole.dtype or copy.shape != whole.shape:
        return False
    return torch.equal(*(one.contiguous().view(torch.uint8) for one in (copy, whole)))


@contextlib.contextmanager
def shown_weights(model: nn.Module) -> Iterator[None]:
    """Show the weights of a model's layers during the block; raise at its end if any is lost.

    Peak memory: a copy of each weight that is asked for and has a layout of its own.
    """
    shown: list[ShownParameters] = []
    for name, layer in model.named_modules():
        if isinstance(layer, Layer) and any(v is None for v in layer._parameters.values()):
            shown.append(ShownParameters(name, layer))
            layer._parameters = shown[-1]
    try:
        yield
    finally:
        for one in shown:
            one.layer._parameters = {name: one.get(name) for name in one}
    if lost := [name for one in shown for name in one.lost()]:
        more = f" and {len(lost) - MOST_NAMES} more" if len(lost) > MOST_NAMES else ""
        raise ValueError(
            "apply_model: the function has changed copies of weights, or their `.data`, which no"
            f" step reads: {', '.join(lost[:MOST_NAMES])}{more}; use LLM.update_weights."
            " Other weights that it changed in place stay changed"
        )
