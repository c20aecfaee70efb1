"""The activation of feed-forward parts that gelu gates."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.table import Rounding
from nanovllm.layers.layer import Layer


class GeluTanhAndMul(Layer):
    """`gelu(gate) * up`, with tanh in the approximation of gelu. It rounds nothing."""

    def forward(self, x: torch.Tensor, rounding: Rounding | None = None) -> torch.Tensor:  # noqa: ARG002
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)
