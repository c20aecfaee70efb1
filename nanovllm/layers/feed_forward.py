"""FeedForward: the part of a block that computes each token by itself, dense or by experts."""

from typing import Any

import torch
from torch import nn

from nanovllm.kernels.table import Rounding
from nanovllm.layers.activation import Activation, SiluAndMul
from nanovllm.layers.build import Build
from nanovllm.layers.experts import Experts
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.router import Router


class FeedForward(nn.Module):
    """Hidden states [T, hidden] -> [T, hidden], which the ranks must sum up."""

    def rounding(self, x: torch.Tensor) -> Rounding | None:  # noqa: ARG002
        """How it rounds as many rows as x has: `forward` takes those, too. None: not at all."""
        return None


class MLP(FeedForward):
    """A gated layer."""

    def __init__(
        self,
        make: Build,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: type[Activation] = SiluAndMul,
        bias: bool = False,
    ) -> None:
        super().__init__()
        ranks, formats = make.ranks, make.formats
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, [intermediate_size] * 2, bias, ranks, formats.of("gate_up_proj")
        )
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size, bias, ranks, formats.of("down_proj")
        )
        self.act_fn = activation()

    def rounding(self, x: torch.Tensor) -> Rounding | None:
        return self.gate_up_proj.rounding(x)

    def forward(self, x: Any) -> torch.Tensor:
        gate_up, down_proj = self.gate_up_proj(x), self.down_proj
        out: torch.Tensor = down_proj(self.act_fn(gate_up, down_proj.rounding(gate_up)))
        return out


class SparseMLP(FeedForward):
    """Experts, and the router that selects `per_token` of them, with a share for each.

    With `normalized`, the shares of a token's experts add up to 1.
    """

    def __init__(
        self,
        make: Build,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        per_token: int,
        *,
        normalized: bool,
    ) -> None:
        super().__init__()
        self.gate = Router(
            hidden_size, num_experts, per_token, normalized, make.formats.in_float32("gate")
        )
        self.experts = Experts(
            num_experts, hidden_size, intermediate_size, make.ranks, make.whole_experts,
            make.formats.of_experts(num_experts), make.formats.names.experts,
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, expert_ids = self.gate.select(x)
        out: torch.Tensor = self.experts(x, expert_ids, shares)
        return out
