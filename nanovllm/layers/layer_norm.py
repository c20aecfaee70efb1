"""LayerNorm, which subtracts the mean before it scales, with or without a bias."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels.table import Rounding
from nanovllm.layers.rms_norm import RMSNorm


class LayerNorm(RMSNorm):
    """LayerNorm over the last dimension, computed in float32 and rounded once.

    It never rounds rows for the next layer, which accepts plain rows.
    """

    is_plain = False

    def __init__(self, size: int, eps: float, *, bias: bool = True) -> None:
        super().__init__(size, eps)
        self.bias = nn.Parameter(torch.zeros(size), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor, rounding: Rounding | None = None) -> Any:  # noqa: ARG002
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, rounding: Rounding | None = None
    ) -> tuple[Any, torch.Tensor]:
        total = residual + self.ranks.all_reduce(x)
        return self.forward(total, rounding), total


class PlusOneLayerNorm(LayerNorm):
    """LayerNorm with the factors 1 + weight, as in Nemotron.

    All is computed in float32: in 16 bits, rounding 1 + weight would make most weights equal.
    """

    initial = 0.0

    def __init__(self, size: int, eps: float, *, bias: bool = True) -> None:
        super().__init__(size, eps, bias=bias)
        self.weight.data.zero_()

    def forward(self, x: torch.Tensor, rounding: Rounding | None = None) -> Any:  # noqa: ARG002
        factors, bias = self.weight.float() + 1, self.bias
        added = None if bias is None else bias.float()
        return F.layer_norm(x.float(), factors.shape, factors, added, self.eps).to(x.dtype)
