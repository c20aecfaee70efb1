"""Activation functions."""

import torch

from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.backend import Backend
from nanovllm.layers.layer import Layer


class SiluAndMul(Layer):
    """`silu(gate) * up` of a merged gate-and-up projection: [T, 2 * I] -> [T, I]."""

    kernels: Kernels = PLAIN

    def bind(self, backend: Backend) -> None:
        self.kernels = backend.kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.silu_and_mul(x)
