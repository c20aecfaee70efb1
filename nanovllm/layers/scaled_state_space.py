"""ScaledStateSpace: a state space with factors of what its first projection makes."""

from collections.abc import Sequence
from typing import Any

import torch

from nanovllm.kernels.table import Rounding
from nanovllm.layers.layer import Build
from nanovllm.layers.state_space import StateSpace
from nanovllm.layers.state_space_mixer import StateSpaceMixer


class ScaledStateSpace(StateSpaceMixer):
    """With `factors` of the gate, the channels, B, C and the time steps, and of the input.

    Without a bias, the factor of the input is multiplied into the others.
    """

    def __init__(
        self, make: Build, hidden_size: int, space: StateSpace, eps: float,
        factors: Sequence[float], factor_in: float,
    ) -> None:  # fmt: skip
        super().__init__(make, hidden_size, space, eps)
        self.factor_in = factor_in if space.in_bias else 1.0
        widths = space.part(make.ranks.size).projected
        parts = [
            torch.full((width,), factor * factor_in / self.factor_in)
            for width, factor in zip(widths, factors, strict=True)
        ]
        self.register_buffer("factors", torch.cat(parts), persistent=False)

    def rounding(self, x: torch.Tensor) -> Rounding | None:
        return None if self.factor_in != 1.0 else super().rounding(x)

    def project_in(self, x: Any) -> torch.Tensor:
        scaled = x if self.factor_in == 1.0 else x * self.factor_in
        return super().project_in(scaled).mul_(self.get_buffer("factors"))
