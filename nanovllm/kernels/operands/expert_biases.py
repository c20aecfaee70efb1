"""ExpertBiases: what experts with biases and a clamped gate have besides their matrices."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class ExpertBiases:
    """The biases of the experts' matrices, and the two numbers of their gate.

    A gate g and an up u become min(g, limit) * sigmoid(alpha * min(g, limit)) * (u' + 1), where u'
    is u between -limit and limit. `down` is None on ranks that do not add this bias.
    """

    gate_up: torch.Tensor  # [E, 2 * I]: of all gates, then of all ups
    down: torch.Tensor | None  # [E, hidden]
    alpha: float
    limit: float
