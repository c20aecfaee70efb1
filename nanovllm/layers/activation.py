"""Activation functions of gated feed-forward layers: [T, 2 * I] -> [T, I]."""

from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.kernels.table import PLAIN, Kernels, Rounding
from nanovllm.layers.backend import Backend
from nanovllm.layers.layer import Layer


class SiluAndMul(Layer):
    """`silu(gate) * up` of a merged gate-and-up projection.

    With a `rounding`, rounded rows for the layer that this rounding is of.
    """

    kernels: Kernels = PLAIN

    def bind(self, backend: Backend) -> None:
        self.kernels = backend.kernels

    def forward(self, x: torch.Tensor, rounding: Rounding | None = None) -> Any:
        return (rounding or self.kernels).silu_and_mul(x)


class GeluTanhAndMul(Layer):
    """`gelu(gate) * up`, with tanh in the approximation of gelu. It rounds nothing."""

    def forward(self, x: torch.Tensor, rounding: Rounding | None = None) -> Any:  # noqa: ARG002
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)


Activation = SiluAndMul | GeluTanhAndMul
