"""`FewRows` for steps in which rows have adapters.

T rows, K inputs, N outputs.

A linear layer and its adapters take one kernel. For weights that it does not read, there are two
more: what adapters add to gate and up is then a bias of each row, and what they add to a sum with
the residual is added to the residual first.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nanovllm.kernels.low_rank import LowRank
from nanovllm.kernels.plain.few_rows import Scaled
from nanovllm.kernels.triton import adapted_linear
from nanovllm.kernels.triton.few_rows import Addends, FewRows, Weight
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

    def _launch(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        scaled: Scaled | None = None,
        gated: bool = False,
        addends: Addends | None = None,
    ) -> torch.Tensor:
        low_rank, groups = self.low_ranks.get(id(weight)), self.groups
        if low_rank is None:
            return super()._launch(x, weight, bias, out, scaled, gated, addends)
        if isinstance(weight, torch.Tensor):
            division = adapted_linear.divide(len(x), weight, low_rank, groups, gated)
            if division is not None:
                return adapted_linear.launch(
                    x, weight, bias, out, scaled, gated, addends, low_rank, groups, division,
                    self._zeros(x),
                )  # fmt: skip
        if gated:
            assert scaled is not None
            of_rows = lora_bias(scaled, low_rank, groups)
            bias = of_rows if bias is None else of_rows.add_(bias)
        elif addends:
            lora_up(lora_down(x, low_rank, groups), low_rank, groups, addends[0])
        squares = super()._launch(x, weight, bias, out, scaled, gated, addends)
        if scaled is not None and not gated:
            lora_up_scaled(scaled, low_rank, groups, out)
        elif not (gated or addends):
            lora_up(lora_down(x, low_rank, groups), low_rank, groups, out)
        return squares
