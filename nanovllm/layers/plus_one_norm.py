"""RMSNorm as in Gemma, which multiplies by 1 + its weights."""

from typing import Any

import torch

from nanovllm.kernels.table import Rounding
from nanovllm.layers.layernorm import RMSNorm


class PlusOneRMSNorm(RMSNorm):
    """RMSNorm with the factors 1 + weight.

    All is computed in float32: in 16 bits, rounding 1 + weight would make most weights equal.
    """

    is_plain = False
    initial = 0.0

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.weight.data.zero_()

    def forward(self, x: torch.Tensor, rounding: Rounding | None = None) -> Any:
        factors = self.weight.float() + 1
        if rounding is not None:
            return rounding.rms_norm(x, factors, self.eps)
        return self.kernels.rms_norm(x.float(), factors, self.eps).to(x.dtype)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, rounding: Rounding | None = None
    ) -> tuple[Any, torch.Tensor]:
        total = residual + self.ranks.all_reduce(x)
        return self.forward(total, rounding), total
