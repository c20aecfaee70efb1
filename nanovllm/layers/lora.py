"""AdapterRows: the adapter of each row of a step; it adds them to a layer's output.

A layer's adapters are a `LowRank` with a group for each slot. Nothing here knows which adapter
is in a slot.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nanovllm.kernels.operands.low_rank import LowRank
from nanovllm.kernels.side_stream import overlapped
from nanovllm.kernels.table import Kernels

MOST_BESIDE = 128  # rows; more rows fill the GPU with the layer alone


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The adapters of a step's rows: slots [T] int32, below 0 for a row without one.

    `groups` is what the kernels know of them, computed once for all layers.
    """

    slots: torch.Tensor
    num_slots: int
    kernels: Kernels
    groups: Any

    def at(self, rows: torch.Tensor) -> "AdapterRows":
        """The adapters of some of the rows."""
        return group_rows(self.slots.index_select(0, rows), self.num_slots, self.kernels)

    def add(
        self, x: torch.Tensor, weights: LowRank, linear: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """The output of `linear`, with the adapters' on rows x added in place.

        Launch `linear` before the adapters' kernels. A kernel may start before the previous kernel
        has ended, and the adapters' kernels read what `group_rows` wrote, so another kernel must
        run between the two. In a decode graph they run at the same time as `linear`, so another
        kernel must run before both.
        """
        down_of = partial(self.kernels.lora_down, x, weights, self.groups)
        if len(x) <= MOST_BESIDE:
            out, down = overlapped(x.device, linear, down_of)
        else:
            out, down = linear(), down_of()
        self.kernels.lora_up(down, weights, self.groups, out, None)
        return out

    def of_pairs(self, expert_ids: torch.Tensor, num_experts: int) -> "AdapterRows":
        """The adapters of pairs of a row and one of its experts [T, K]: an expert's for each slot.

        Ids outside [0, num_experts) are of other ranks.
        """
        slots, num_slots = self.slots[:, None], self.num_slots * num_experts
        elsewhere = (slots < 0) | (expert_ids < 0) | (expert_ids >= num_experts)
        pairs = (slots * num_experts + expert_ids).masked_fill(elsewhere, -1)
        return group_rows(pairs.flatten().int(), num_slots, self.kernels)

    def add_embedding(self, token_ids: torch.Tensor, weights: LowRank, out: torch.Tensor) -> None:
        """Add the adapters' vectors of the tokens, as if each were a row with a single 1."""
        down = weights.a[self.slots.clamp(min=0).long(), :, token_ids]
        self.kernels.lora_up(down[None], weights, self.groups, out, None)


def group_rows(slots: torch.Tensor, num_slots: int, kernels: Kernels) -> AdapterRows:
    """The adapters of rows with these slots [T] int32; below 0: none.

    Does not sync unless the kernels do; a CUDA graph can hold it.
    """
    return AdapterRows(slots, num_slots, kernels, kernels.group_rows(slots, num_slots))


@dataclass(frozen=True, slots=True)
class PairAdapters:
    """The adapters of pairs of a row and one of its experts: `PairAdditions` for kernels."""

    pairs: AdapterRows
    gate_up: LowRank
    down: LowRank

    def add_gates(self, x: torch.Tensor, gates: torch.Tensor) -> None:
        """Add to gates and ups [N, 2 * I]."""
        kernels, groups = self.pairs.kernels, self.pairs.groups
        kernels.lora_up(
            kernels.lora_down(x, self.gate_up, groups), self.gate_up, groups, gates, None
        )

    def add_outputs(self, inner: torch.Tensor, outputs: torch.Tensor, shares: torch.Tensor) -> None:
        """Add to outputs [N, hidden] that are multiplied by `shares`."""
        kernels, groups = self.pairs.kernels, self.pairs.groups
        down = kernels.lora_down(inner, self.down, groups)
        kernels.lora_up(down, self.down, groups, outputs, shares)
