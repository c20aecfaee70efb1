"""Scaled: rows with an unfinished norm. ExpertWeights: the weights of a layer of experts.

The kernels for decode steps of few rows read both.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Scaled:
    """Rows [T, K] times a norm's weight, not yet divided by each row's root mean square.

    The missing factor of a row is 1 / sqrt(sum(squares) / K + eps). A linear layer can multiply its
    outputs by it, instead of its inputs.
    """

    product: torch.Tensor  # rows * the norm's weight
    squares: torch.Tensor  # [T, any], float32: parts of the rows' sums of squares
    eps: float

    def normed(self) -> torch.Tensor:
        """The finished norm, in float32."""
        squares = self.squares.sum(dim=1, keepdim=True)
        return self.product.float() * torch.rsqrt(squares / self.product.shape[1] + self.eps)


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of a layer of experts, from which each token takes `per_token`."""

    router: Any
    gate_up: Any  # [E, 2 * I, hidden]
    down: Any  # [E, hidden, I]
    per_token: int
    normalized: bool  # whether a token's shares sum to one
