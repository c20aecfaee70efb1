"""ScaledMLP: a gated layer with factors of its gate and of its output."""

from typing import Any

import torch

from nanovllm.layers.feed_forward import MLP
from nanovllm.layers.layer import Build


class ScaledMLP(MLP):
    """The gate is multiplied by `gate_factor` before silu, and the output by `out_factor`."""

    def __init__(
        self, make: Build, hidden_size: int, intermediate_size: int, *, bias: bool,
        gate_factor: float, out_factor: float,
    ) -> None:  # fmt: skip
        super().__init__(make, hidden_size, intermediate_size, bias=bias)
        self.gate_factor, self.out_factor = gate_factor, out_factor

    def forward(self, x: Any) -> torch.Tensor:
        gate_up, down_proj = self.gate_up_proj(x), self.down_proj
        gate_up[:, : gate_up.shape[1] // 2] *= self.gate_factor
        out: torch.Tensor = down_proj(self.act_fn(gate_up, down_proj.rounding(gate_up)))
        return out * self.out_factor
