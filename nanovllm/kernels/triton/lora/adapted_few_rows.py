"""`FewRows` for steps in which rows have adapters.

T rows, K inputs, N outputs.

One kernel computes a linear layer and its adapters. Two more kernels are used for weights or
adapters that it does not support: the adapters' outputs for gate and up are then a bias of each
row, and those for a sum with the residual are first added to the residual.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from nanovllm.kernels.operands.low_rank import LowRank
from nanovllm.kernels.side_stream import overlapped
from nanovllm.kernels.triton.linear.few_rows import FewRows, Weight
from nanovllm.kernels.triton.linear.row_outputs import RowOperands
from nanovllm.kernels.triton.lora import adapted_linear
from nanovllm.kernels.triton.lora.lora import launch_up, lora_bias, lora_down, lora_up
from nanovllm.kernels.triton.lora.row_groups import RowGroups


class CountedAdapters(NamedTuple):
    """A weight's adapters, and the arrivals counter of its kernel: zero before its one launch."""

    low_rank: LowRank
    arrivals: torch.Tensor


def with_counters(low_ranks: Mapping[int, LowRank]) -> dict[int, CountedAdapters]:
    """The adapters of weights, with new counters at zero, for one step."""
    if not low_ranks:
        return {}
    device = next(iter(low_ranks.values())).a.device
    zeros = torch.zeros(len(low_ranks), 1, dtype=torch.int32, device=device).unbind()
    return {
        weight: CountedAdapters(low_rank, zero)
        for (weight, low_rank), zero in zip(low_ranks.items(), zeros, strict=True)
    }


@dataclass(frozen=True, kw_only=True)
class AdaptedFewRows(FewRows):
    """The kernels of one step, which also add the adapters' outputs.

    `adapters` has the adapters of each weight with room for some, by the weight's `id`. Experts
    have no room for adapters.
    """

    groups: RowGroups
    adapters: Mapping[int, CountedAdapters]

    def _launch(self, rows: RowOperands, weight: Weight) -> torch.Tensor:
        adapters, groups, launch = self.adapters.get(id(weight)), self.groups, super()._launch
        if adapters is None:
            return launch(rows, weight)
        x, scaled, (low_rank, arrivals) = rows.x, rows.scaled, adapters
        if isinstance(weight, torch.Tensor):
            division = adapted_linear.divide(len(x), weight, low_rank, groups, rows.gated)
            if division is not None:
                return adapted_linear.launch(rows, weight, low_rank, groups, division, arrivals)
        if rows.gated:
            assert scaled is not None
            bias = lora_bias(scaled, low_rank, groups)
            if rows.bias is not None:
                bias.add_(rows.bias)
            return launch(rows._replace(bias=bias), weight)
        down_of = partial(lora_down, x, low_rank, groups)
        if rows.addends:
            lora_up(down_of(), low_rank, groups, rows.addends[0])
            return launch(rows, weight)
        squares, down = overlapped(x.device, partial(launch, rows, weight), down_of)
        launch_up(down, low_rank, groups, rows.out, scaled=scaled)
        return squares
