"""PlainMLP: a feed-forward part without a gate."""

from typing import Any

import torch

from nanovllm.kernels.table import Rounding
from nanovllm.layers.activations import Activation
from nanovllm.layers.feed_forward import FeedForward
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear


class PlainMLP(FeedForward):
    """A linear layer, an activation, and a linear layer."""

    def __init__(
        self,
        make: Build,
        hidden_size: int,
        intermediate_size: int,
        activation: Activation,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        ranks, formats = make.ranks, make.formats
        self.up_proj = MergedColumnParallelLinear(
            hidden_size, [intermediate_size], bias, ranks, formats.of("up_proj")
        )
        self.act_fn = activation
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size, bias, ranks, formats.of("down_proj")
        )

    def rounding(self, x: torch.Tensor) -> Rounding | None:
        return self.up_proj.rounding(x)

    def forward(self, x: Any) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act_fn(self.up_proj(x)))
        return out
