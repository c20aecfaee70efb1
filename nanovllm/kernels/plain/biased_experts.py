"""Layers of experts with biases and a clamped gate: see `ExpertBiases`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.kernels.operands.expert_biases import ExpertBiases
from nanovllm.kernels.operands.low_rank import PairAdditions
from nanovllm.kernels.plain.experts import Weights, adapted_experts, experts
from nanovllm.kernels.plain.sigmoid import sigmoid

Linear = Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]


def biased_experts(
    x: torch.Tensor,
    gate_up: Weights,
    down: Weights,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
    biases: ExpertBiases,
    additions: PairAdditions | None = None,
    linear: Linear = F.linear,
) -> torch.Tensor:
    """As `experts` of `experts.py`, with biases; with `additions`, as `adapted_experts`.

    `linear` multiplies by a matrix and adds a bias. Syncs.
    """
    weights = WithBiases(gate_up, biases.gate_up), WithBiases(down, biases.down)
    options: dict[str, Any] = dict(
        activation=partial(clamped_gate, biases=biases), linear=lambda x, each: linear(x, *each)
    )
    operands = x, *weights, expert_ids, shares, num_experts
    if additions is None:
        return experts(*operands, **options)
    return adapted_experts(*operands, additions, **options)


class WithBiases(Sequence[Any]):
    """Each expert's matrix and its bias, which may be None."""

    def __init__(self, matrices: Weights, biases: torch.Tensor | None) -> None:
        self._matrices, self._biases = matrices, biases

    def __len__(self) -> int:
        return len(self._matrices)

    def __getitem__(self, expert: Any) -> Any:
        return self._matrices[expert], None if self._biases is None else self._biases[expert]


def clamped_gate(x: torch.Tensor, biases: ExpertBiases) -> torch.Tensor:
    """The gated rows [N, I] of gates and ups x [N, 2 * I], which have their biases."""
    gate, up = x.chunk(2, dim=-1)
    gate = gate.clamp(max=biases.limit)
    up = up.clamp(-biases.limit, biases.limit)
    return (up + 1) * (gate * sigmoid(gate * biases.alpha))
