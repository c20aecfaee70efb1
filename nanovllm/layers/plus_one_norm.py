"""RMSNorm as in Gemma, which multiplies by 1 + its weights."""

from typing import Any

import torch

from nanovllm.kernels.table import Rounding
from nanovllm.layers.backend import Backend
from nanovllm.layers.mixer import SelfAttention
from nanovllm.layers.rms_norm import RMSNorm


class PlusOneRMSNorm(RMSNorm):
    """RMSNorm with the factors 1 + weight.

    They are float32: in 16 bits, rounding 1 + weight would make most of them equal. After `bind`,
    `bound_factors` has them; whoever changes weights then calls `refresh`.
    """

    is_plain = False
    initial = 0.0
    bound_factors: torch.Tensor | None = None

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.weight.data.zero_()

    def bind(self, backend: Backend) -> None:
        super().bind(backend)
        self.refresh()

    def refresh(self) -> None:
        """Compute the factors of the present weights, in the memory that decode graphs read."""
        if self.bound_factors is None:
            self.bound_factors = self.weight.detach().float() + 1
        else:
            self.bound_factors.copy_(self.weight).add_(1)

    @property
    def factors(self) -> torch.Tensor:
        """1 + weight, in float32."""
        return self.weight.float() + 1 if self.bound_factors is None else self.bound_factors

    def forward(self, x: torch.Tensor, rounding: Rounding | None = None) -> Any:
        return (rounding or self.kernels).rms_norm(x, self.factors, self.eps)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, rounding: Rounding | None = None
    ) -> tuple[Any, torch.Tensor]:
        if rounding is None and (kernels := self.ranks.few(len(x), x)):
            return kernels.add_rms_norm(x, residual, self.factors, self.eps)
        x = self.ranks.all_reduce(x)
        return (rounding or self.kernels).add_rms_norm(x, residual, self.factors, self.eps)


def factors_of(norm: RMSNorm) -> torch.Tensor | None:
    """What a norm multiplies normalized rows by; None if fused kernels cannot compute it."""
    if isinstance(norm, PlusOneRMSNorm):
        return norm.factors
    return norm.weight if norm.is_plain else None


class Factors:
    """A norm as the kernels of attention read it: its factors in place of a weight."""

    def __init__(self, norm: PlusOneRMSNorm) -> None:
        self.norm, self.eps = norm, norm.eps

    @property
    def weight(self) -> torch.Tensor:
        """The factors."""
        return self.norm.factors


class PlusOneAttention(SelfAttention):
    """Self-attention with such norms of queries and keys, in the kernel that rotates and stores."""

    def __init__(
        self, *args: Any, head_norms: tuple[PlusOneRMSNorm, PlusOneRMSNorm], **others: Any
    ) -> None:
        super().__init__(*args, head_norms=head_norms, **others)
        self.norms: Any = tuple(Factors(norm) for norm in head_norms)
