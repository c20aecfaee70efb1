"""Layers of experts with biases and a clamped gate: see `ExpertBiases`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.kernels.operands.expert_biases import ExpertBiases
from nanovllm.kernels.plain.experts import Weights, pairs_by_expert

Linear = Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]


def biased_experts(
    x: torch.Tensor,
    gate_up: Weights,
    down: Weights,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
    biases: ExpertBiases,
    linear: Linear = F.linear,
) -> torch.Tensor:
    """As `experts` of `experts.py`, with biases. `linear` multiplies by a matrix and adds a bias.

    A row adds up its experts in their order. Syncs.
    """
    assert len(down) <= num_experts
    per_row, flat_shares = expert_ids.shape[1], shares.flatten()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, chosen in pairs_by_expert(expert_ids, len(down)):
        rows = chosen // per_row
        inner = clamped_gate(linear(x[rows], gate_up[expert], biases.gate_up[expert]), biases)
        y = linear(inner, down[expert], None if biases.down is None else biases.down[expert])
        out.index_add_(0, rows, y.float() * flat_shares[chosen, None])
    return out.to(x.dtype)


def clamped_gate(x: torch.Tensor, biases: ExpertBiases) -> torch.Tensor:
    """The gated rows [N, I] of gates and ups x [N, 2 * I], which have their biases."""
    gate, up = x.chunk(2, dim=-1)
    gate = gate.clamp(max=biases.limit)
    up = up.clamp(-biases.limit, biases.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * biases.alpha))
