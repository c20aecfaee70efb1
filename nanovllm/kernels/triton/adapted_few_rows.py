"""`FewRows` for steps in which rows have adapters: each linear layer takes two more kernels.

T rows, K inputs, N outputs.

What adapters add to gate and up is a bias of each row; what they add to a sum with the residual is
added to the residual first.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nanovllm.kernels.low_rank import LowRank
from nanovllm.kernels.plain.few_rows import Scaled
from nanovllm.kernels.triton.few_rows import FewRows, Weight
from nanovllm.kernels.triton.lora import lora_bias, lora_down, lora_up, lora_up_scaled
from nanovllm.kernels.triton.row_groups import RowGroups


@dataclass(frozen=True, kw_only=True)
class AdaptedFewRows(FewRows):
    """The kernels, with the adapters' additions.

    `low_ranks` has those of the weights with room for adapters, by the weights' `id`. Experts have
    no room for any.
    """

    groups: RowGroups
    low_ranks: Mapping[int, LowRank]

    def linear(self, x: Scaled, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`norm @ weight.T + bias`."""
        out = super().linear(x, weight, bias)
        if low_rank := self.low_ranks.get(id(weight)):
            lora_up_scaled(x, low_rank, self.groups, out)
        return out

    def product(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x @ weight.T + bias`: a rank's part of a sum."""
        out = super().product(x, weight, bias)
        self._add(x, weight, out)
        return out

    def gated(self, x: Scaled, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`silu(gate) * up` of `norm @ weight.T + bias`."""
        if low_rank := self.low_ranks.get(id(weight)):
            of_rows = lora_bias(x, low_rank, self.groups)
            bias = of_rows if bias is None else of_rows.add_(bias)
        return super().gated(x, weight, bias)

    def add(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, Scaled]:
        """`residual + x @ weight.T + bias`, and the sum scaled. Overwrites the residual."""
        self._add(x, weight, residual)
        return super().add(x, weight, bias, residual, norm, eps)

    def _add(self, x: torch.Tensor, weight: Weight, out: torch.Tensor) -> None:
        if low_rank := self.low_ranks.get(id(weight)):
            lora_up(lora_down(x, low_rank, self.groups), low_rank, self.groups, out)
