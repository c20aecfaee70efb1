"""A decoder with several streams of hidden states between its blocks (`layers/altup.py`)."""

from typing import Any

import torch
from torch import nn

from nanovllm.kernels.table import Kernels
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.models.per_layer_decoder import PerLayerDecoder

LEAST = 1e-5  # a mean square


class AltUpDecoder(PerLayerDecoder):
    """Streams 1 to N-1 begin as projections of the embedding, which is stream 0.

    The output is the mean of stream 0 and of projections of the others. Projections get the
    magnitude of stream 0.
    """

    def __init__(self, make: Build, *args: Any, num_streams: int) -> None:
        super().__init__(make, *args)
        inside, hidden = make.inside("model"), self.embed_tokens.weight.shape[1]

        def projections(name: str) -> nn.ModuleList:
            of = inside.inside(name).formats.of
            numbers = range(num_streams - 1)
            return nn.ModuleList(
                ReplicatedLinear(hidden, hidden, False, of(f"{i}")) for i in numbers
            )

        self.altup_projections = projections("altup_projections")
        self.altup_unembed_projections = projections("altup_unembed_projections")

    def begin(self, embedded: torch.Tensor) -> torch.Tensor:
        kernels = self.norm.kernels
        others = [alike(linear(embedded), embedded, kernels) for linear in self.altup_projections]
        return torch.stack([embedded, *others])

    def end(self, x: torch.Tensor) -> torch.Tensor:
        (first, *others), kernels = x, self.norm.kernels
        pairs = zip(self.altup_unembed_projections, others, strict=True)
        alikes = [alike(linear(other), first, kernels) for linear, other in pairs]
        return torch.stack([first, *alikes]).mean(0)


def alike(x: torch.Tensor, like: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """The rows of x [T, hidden] with the magnitudes of those of `like`."""
    magnitude = mean_square(x, kernels).clamp(min=LEAST).sqrt()
    return x * mean_square(like, kernels).sqrt() / magnitude


def mean_square(x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """The mean square [T, 1] of each row."""
    return (kernels.row_sums(x.square()) / x.shape[-1]).to(x.dtype)
