"""Blank models: a rank's model before loading, without memory; memory for its layers."""

import copy
from dataclasses import replace

import torch

from nanovllm.engine.run.shard import Shard
from nanovllm.formats.quantize import SOURCE
from nanovllm.formats.stored import StoredTensor
from nanovllm.layers.layer import Layer
from nanovllm.layers.ranks import Ranks
from nanovllm.models.carried_head import CarriedHead, ModelWithHead
from nanovllm.models.decoder import CausalLM
from nanovllm.models.parts import made_with
from nanovllm.weights.bound_layers import alias_of


def blank_model(shard: Shard, ranks: Ranks | None = None) -> CausalLM:
    """The model before loading, without memory, for the shard's ranks or for other `ranks`.

    It has the heads that the checkpoint carries, if the shard uses them.
    """
    live, before = shard.model, torch.get_default_dtype()
    torch.set_default_dtype(shard.placement.dtype)
    try:
        with torch.device("meta"), torch.inference_mode(False):
            ranks = ranks or shard.ranks
            model = made_with(shard.model_config, replace(live.make, ranks=ranks))
            heads = [head.blank(ranks) for head in carried_heads(shard)]
            return with_heads(model, heads)
    finally:
        torch.set_default_dtype(before)


def carried_heads(shard: Shard) -> list[CarriedHead]:
    """The heads in the model's checkpoint that the shard uses: one, or none."""
    return [model for _, model in shard.drafting.models if isinstance(model, CarriedHead)]


def with_heads(model: CausalLM, heads: list[CarriedHead]) -> CausalLM:
    """The model, with its heads if there are some."""
    for head in heads:
        model = ModelWithHead(model, head)
    return model


def with_memory(layer: Layer, device: torch.device) -> Layer:
    """Copy a blank layer; the copy's parameters and buffers have memory, without values."""
    filled = copy.copy(layer)

    def memory(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device)

    filled._parameters = {
        name: param
        if param is None or (isinstance(param, StoredTensor) and param.stored is SOURCE)
        else alias_of(param, memory(param))
        if isinstance(param, StoredTensor)
        else torch.nn.Parameter(memory(param), requires_grad=False)
        for name, param in layer._parameters.items()
    }
    filled._buffers = {
        name: None if buffer is None else memory(buffer) for name, buffer in layer._buffers.items()
    }
    return filled
