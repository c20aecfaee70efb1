"""Random weights in place of a checkpoint's."""

from collections.abc import Iterator

import torch
from torch import nn

from nanovllm.formats.dummy_values import dummy_values as values_of
from nanovllm.models.decoder import Model
from nanovllm.models.loader import fill_param, layer_of


def load_dummy(model: Model, whole: Model, seed: int) -> None:
    """Give every matrix of `model` random weights, which do not depend on the number of ranks.

    `whole` is the model of a single rank: only its shapes are used, so it may be on the meta
    device. Peak memory: this rank's part, and one whole matrix.
    """
    for name, _, values in dummy_values(whole, seed, next(model.parameters()).device):
        if values is not None:
            fill_param(model, name, None, values)


def dummy_values(
    whole: Model, seed: int, device: torch.device
) -> Iterator[tuple[str, nn.Parameter, torch.Tensor | None]]:
    """The random weights of a model of a single rank; None where a parameter stays as it is."""
    for index, (name, param) in enumerate(whole.named_parameters()):
        generator = torch.Generator(device=device).manual_seed(seed + index)
        values = values_of(param, generator)
        if values is not None:  # files may have another shape
            values = values.view(layer_of(whole, name.rpartition(".")[0]).whole_shape(param, None))
        yield name, param, values
