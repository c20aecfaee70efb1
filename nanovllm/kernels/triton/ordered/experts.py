"""Routers, experts and adapters with one order of sums, for any number of rows.

Their kernels add up all inputs in order, as in `linear`. What may depend on the number of rows is
chosen once: parts that are added up later, and which intermediate results are rounded.
"""

from dataclasses import replace
from typing import Any

import torch

from nanovllm.kernels.operands.expert_biases import ExpertBiases
from nanovllm.kernels.operands.low_rank import LowRank, PairAdditions
from nanovllm.kernels.triton.experts import biased_experts as biased
from nanovllm.kernels.triton.experts.experts import Activation, Stack, compute
from nanovllm.kernels.triton.experts.mx_stack import MxStack
from nanovllm.kernels.triton.experts.route import Router
from nanovllm.kernels.triton.lora import lora
from nanovllm.kernels.triton.lora.row_groups import RowGroups


def router_for(*arguments: Any) -> Router:
    """As `Router.of`."""
    return replace(Router.of(*arguments), one_order=True)


def experts(
    x: torch.Tensor,
    gate_up: Stack,
    down: Stack,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
    activation: Activation | None = None,
) -> torch.Tensor:
    """For each row of x [T, hidden], the sum of its K experts' outputs, weighted by `shares`.

    Gates and an expert's outputs are rounded, so that kernels which fuse nothing agree with these.
    """
    return compute(
        x, gate_up, down, expert_ids, shares, num_experts, None, activation, rounded=True
    )


def adapted_experts(
    x: torch.Tensor,
    gate_up: Stack,
    down: Stack,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
    additions: PairAdditions | None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """As `experts`, with adapters. A row without one gets the bits of `experts`."""
    return compute(
        x, gate_up, down, expert_ids, shares, num_experts, additions, activation, rounded=True
    )


def biased_experts(
    x: torch.Tensor,
    gate_up: Stack | MxStack,
    down: Stack | MxStack,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
    biases: ExpertBiases,
    additions: PairAdditions | None = None,
) -> torch.Tensor:
    """As `experts`, with biases and a clamped gate, and with or without adapters."""
    return biased.compute(
        x, gate_up, down, expert_ids, shares, num_experts, biases, additions, rounded=True
    )


def lora_down(x: torch.Tensor, weights: LowRank, groups: RowGroups) -> torch.Tensor:
    """`x @ A.T` for rows with an adapter, in float32, in as many parts as for few rows."""
    return lora.down_in_parts(lora.num_parts(1, x.shape[1]), x, weights, groups)


def lora_up(
    down: torch.Tensor,
    weights: LowRank,
    groups: RowGroups,
    out: torch.Tensor,
    shares: torch.Tensor | None = None,
) -> None:
    """As the kernel whose compiler may round a product with a share or not, by the tile."""
    lora.launch_up(down, weights, groups, out, shares, may_fuse=False)
