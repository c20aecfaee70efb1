"""Calibration: a block's layers, while the text goes through the model, and what they read."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from nanovllm.layers.experts import Experts
from nanovllm.layers.layer import Layer
from nanovllm.layers.linear import LinearBase
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import fill_param
from nanovllm.models.not_finite import are_all_finite
from nanovllm.quantize.plan import Source
from nanovllm.quantize.walk import BACKEND, Walk, give_states

Products = dict[str, torch.Tensor]


class Calibration:
    """The text's way through the blocks, of which only one has its weights in memory.

    `model` is on the CPU: its parameters take no memory before they are filled.
    """

    def __init__(
        self, model: CausalLM, samples: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        self.model, self.device = model, device
        self.walk = Walk(model, samples, device)

    def fill_outside(self, sources: Iterable[Source]) -> None:
        """Fill what is computed before the blocks."""
        fill(self.model, [each for each in sources if not each.module.startswith("lm_head")])
        for name, child in self.model.model.named_children():
            if name != "layers":
                self._prepare(child)

    def products(self, index: int, sources: Iterable[Source], modules: Iterable[str]) -> Products:
        """Fill a block, and sum up the products of the inputs of some of its layers.

        A layer that reads nothing of this text has none.
        """
        fill(self.model, sources)
        block = self.model.model.layers[index]
        self._prepare(block)
        give_states(block, self.device, torch.get_default_dtype())
        with _summing(self.model, modules) as found:
            self.walk.collect()
        return found

    def move(self, index: int) -> None:
        """Compute the block with the weights that it has now, and free them."""
        self.walk.move()
        for param in self.model.model.layers[index].parameters():
            param.data = param.data.new_empty(0)

    def _prepare(self, part: nn.Module) -> None:
        """Move a part of the model to the device. Linear layers stay as they are filled."""
        part.to(self.device)
        for layer in part.modules():
            if isinstance(layer, Layer) and not isinstance(layer, LinearBase | Experts):
                layer.bind(BACKEND)


def fill(model: CausalLM, sources: Iterable[Source]) -> None:
    """Fill the model's parameters from tensors of the checkpoint, which must be finite."""
    used = [(source, source.target) for source in sources if source.target is not None]
    for source, target in used:
        fill_param(model, target.param, target.shard_id, source.tensor)
    names = dict.fromkeys(target.param for _, target in used)
    if not all(are_all_finite(model.get_parameter(name)) for name in names):
        for source, _ in used:
            source.values()  # names the tensor


@contextmanager
def _summing(model: CausalLM, modules: Iterable[str]) -> Iterator[Products]:
    """Sum up the products [K, K] of pairs of the inputs of these layers, in float32."""
    found: Products = {}

    def add(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        rows = args[0].flatten(0, -2).float()
        if name not in found:
            found[name] = rows.new_zeros(rows.shape[1], rows.shape[1])
        found[name].addmm_(rows.t(), rows)

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(partial(add, name)) for name in modules
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
