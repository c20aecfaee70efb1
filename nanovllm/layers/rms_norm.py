"""RMSNorm, which multiplies by its weights."""

from typing import Any

import torch
from torch import nn

from nanovllm.kernels.table import PLAIN, Kernels, Rounding
from nanovllm.layers.backend import Backend
from nanovllm.layers.layer import Layer
from nanovllm.layers.ranks import ALONE, Ranks


class RMSNorm(Layer):
    """Root-mean-square norm over the last dimension, computed in float32.

    With the `rounding` of the next layer, the result has rows that are rounded for that layer.
    `add` and `of_sum` normalize the sum over `ranks`, which the block or the decoder sets by
    `sum_over`.
    """

    kernels: Kernels = PLAIN
    is_plain = True  # whether fused kernels compute it, by `weight` and `eps`

    def __init__(self, size: int, eps: float, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.ranks = ranks
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)

    def sum_over(self, ranks: Ranks) -> None:
        """From now on, add up the inputs of these ranks before they are normalized."""
        self.ranks = ranks

    def bind(self, backend: Backend) -> None:
        self.kernels = backend.kernels

    def forward(self, x: torch.Tensor, rounding: Rounding | None = None) -> Any:
        return (rounding or self.kernels).rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of all ranks' x. It may overwrite x."""
        normed: torch.Tensor = self.forward(self.ranks.all_reduce(x))
        return normed

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, rounding: Rounding | None = None
    ) -> tuple[Any, torch.Tensor]:
        """Return the norm of the residual plus all ranks' x, and that sum, the next residual.

        It may overwrite x.
        """
        if rounding is None and (kernels := self.ranks.few(len(x), x)):
            return kernels.add_rms_norm(x, residual, self.weight, self.eps)
        x = self.ranks.all_reduce(x)
        return (rounding or self.kernels).add_rms_norm(x, residual, self.weight, self.eps)
