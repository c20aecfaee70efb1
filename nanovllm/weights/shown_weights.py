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


class ShownParameters(dict[str, Any]):
    """A layer's parameters, with those that `bind` has dropped. `copies` are those handed out."""

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer._parameters)
        self.layer, self.copies = layer, dict[str, nn.Parameter]()

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

    def check_unchanged(self) -> None:
        """Raise if the caller has changed a copy, which no step reads."""
        for name, copy in self.copies.items():
            whole = unpacked(self.layer, name)
            if whole is None or not torch.equal(copy.view(torch.uint8), whole.view(torch.uint8)):
                raise ValueError(
                    f"apply_model: {type(self.layer).__name__} has its {name} in a layout of the"
                    " kernels, and the function has changed a copy of it; use LLM.update_weights"
                )

    def _shown(self, name: str) -> Any:
        value = self.get(name) if name not in self.copies else self.copies[name]
        if value is not None:
            return value
        if (memory := kept(self.layer, name)) is not None:
            return nn.Parameter(memory, requires_grad=False)
        with torch.inference_mode(False), torch.no_grad():
            copy = unpacked(self.layer, name)
            if copy is not None:
                self.copies[name] = nn.Parameter(copy.contiguous(), requires_grad=False)
        return self.copies.get(name)

    def _is_lost(self, name: str) -> bool:
        return isinstance(self.layer, LinearBase) and name in self.layer.weight_format.tensors


@contextlib.contextmanager
def shown_weights(model: nn.Module) -> Iterator[None]:
    """Show the weights of a model's layers during the block; raise at its end if any is lost.

    Peak memory: a copy of each weight that is asked for and has a layout of its own.
    """
    shown: list[ShownParameters] = []
    for layer in model.modules():
        if isinstance(layer, Layer) and any(v is None for v in layer._parameters.values()):
            shown.append(ShownParameters(layer))
            layer._parameters = shown[-1]
    try:
        yield
    finally:
        for one in shown:
            one.layer._parameters = {name: one.get(name) for name in one}
    for one in shown:
        one.check_unchanged()
