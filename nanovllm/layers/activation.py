"""Activations."""

import torch
from torch import nn

from nanovllm.kernels.table import PLAIN, Kernels


class SiluAndMul(nn.Module):
    """`silu(gate) * up` of a merged gate-and-up projection: [T, 2 * I] -> [T, I]."""

    kernels: Kernels = PLAIN  # the runner binds others

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.silu_and_mul(x)
