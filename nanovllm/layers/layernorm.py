"""RMSNorm."""

import torch
from torch import nn

from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.backend import Backend
from nanovllm.layers.layer import Layer


class RMSNorm(Layer):
    """Root-mean-square norm over the last dimension, computed in float32. Inputs are unchanged."""

    kernels: Kernels = PLAIN

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)

    def bind(self, backend: Backend) -> None:
        self.kernels = backend.kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `norm(x + residual)` and the sum, which is the next residual."""
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)
