"""Heads that a model's checkpoint carries, and the model together with them."""

from dataclasses import replace

from nanovllm.layers.ranks import Ranks
from nanovllm.models.decoder import CausalLM, Model


class CarriedHead(CausalLM):
    """A head with layers in `model`. Its tensors in files have names that begin with `own`.

    They get names that begin with `prefix`.
    """

    own: str
    prefix: str

    def blank(self, ranks: Ranks) -> "CarriedHead":
        """The head for these ranks before loading. PyTorch's default type and device are set."""
        raise NotImplementedError


class ModelWithHead(CausalLM):
    """A model and a head, with the same modules: its tensors are all those of the checkpoint.

    Those of the head begin with `prefix`.
    """

    def __init__(self, model: CausalLM, head: CarriedHead) -> None:
        Model.__init__(self)
        self.make, self.model, self.lm_head = model.make, model.model, model.lm_head
        self.tied_weights, self.prefix = model.tied_weights, head.prefix
        others = tuple(each for each in model.names.skipped if each != head.own)
        self.names = replace(model.names, skipped=others)
        self.add_module(head.prefix.removesuffix("."), head.model)
