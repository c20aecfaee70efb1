"""FeedForward: the part of a block that computes each token by itself. Here is the dense one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nanovllm.kernels.table import PLAIN, Kernels, Rounding
from nanovllm.layers.backend import Backend
from nanovllm.layers.layer import Build, Layer
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear


class SiluAndMul(Layer):
    """`silu(gate) * up` of a merged gate-and-up projection.

    With the `rounding` of the next layer, the result has rows that are rounded for that layer.
    """

    kernels: Kernels = PLAIN

    def bind(self, backend: Backend) -> None:
        self.kernels = backend.kernels

    def forward(self, x: torch.Tensor, rounding: Rounding | None = None) -> Any:
        return (rounding or self.kernels).silu_and_mul(x)


class FeedForward(nn.Module):
    """Hidden states [T, hidden] -> [T, hidden]; the sum of all ranks' results is the output."""

    def rounding(self, x: torch.Tensor) -> Rounding | None:  # noqa: ARG002
        """How the kernel before `forward` may round len(x) rows; None if it must not round."""
        return None


class MLP(FeedForward):
    """A gated layer. `activation` makes a layer that is called as `SiluAndMul` is."""

    def __init__(
        self,
        make: Build,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Callable[[], Layer] = SiluAndMul,
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
