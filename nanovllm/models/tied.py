"""The check of a tied tensor that files have under both of its names."""

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
