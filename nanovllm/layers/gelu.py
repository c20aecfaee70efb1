"""The activation of feed-forward parts that gelu gates."""

import torch

from nanovllm.kernels.table import Rounding
from nanovllm.layers.feed_forward import SiluAndMul


class GeluTanhAndMul(SiluAndMul):
    """`gelu(gate) * up`, with tanh in the approximation of gelu. It rounds nothing."""

    def forward(self, x: torch.Tensor, rounding: Rounding | None = None) -> torch.Tensor:  # noqa: ARG002
        return self.kernels.gelu_and_mul(x)
