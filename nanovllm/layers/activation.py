"""Activation functions."""

from typing import Any

import torch

from nanovllm.kernels.quantized import Rounding
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.backend import Backend
from nanovllm.layers.layer import Layer


class SiluAndMul(Layer):
    """`silu(gate) * up` of a merged gate-and-up projection: [T, 2 * I] -> [T, I].

    With a `rounding`, rounded rows for the layer that this rounding is of.
    """

    kernels: Kernels = PLAIN

    def bind(self, backend: Backend) -> None:
        self.kernels = backend.kernels

    def forward(self, x: torch.Tensor, rounding: Rounding | None = None) -> Any:
        return (rounding or self.kernels).silu_and_mul(x)
