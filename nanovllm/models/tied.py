"""Tied tensors that files have under both names: which ones, and whether they are equal."""

from collections.abc import Collection, Mapping

import torch
from torch import nn

from nanovllm.formats.stored import Loaded
from nanovllm.layers.layer import Layer
from nanovllm.models.decoder import Model


@torch.inference_mode()
def check_equal(model: Model, param: str, tensor: Loaded) -> None:
    """Raise unless the tensor has the values of `param`. Makes a copy of it for a moment."""
    filled = model.get_parameter(param)
    other = nn.Parameter(torch.empty_like(filled), requires_grad=False)
    layer = model.get_submodule(param.rpartition(".")[0])
    assert isinstance(layer, Layer)
    layer.weight_loader(other, tensor, None)
    if not torch.equal(other, filled):
        alias = next(alias for alias, name in model.tied_weights.items() if name == param)
        raise ValueError(
            f"other values, so that {alias} and {param} differ, but tie_word_embeddings in"
            " config.json is true; set it to false to use both"
        )


def second_names(
    tied: Mapping[str, str], names: Collection[str], found: Collection[str]
) -> list[str]:
    """The tied tensors of a file that also occur by their other name, here or in a file before."""
    second = []
    for alias, name in tied.items():
        if alias in names and (name in names or name in found):
            second.append(alias)
        elif name in names and alias in found:
            second.append(name)
    return second
