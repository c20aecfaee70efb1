"""Routers, experts and adapters with one order of sums, for any number of rows.

Their kernels add up all inputs in order, as in `linear`. What may depend on the number of rows is
chosen once: parts that are added up later, and which intermediate results are rounded.
"""

from dataclasses import replace
from typing import Any

import torch

from nanovllm.kernels.operands.low_rank import LowRank
from nanovllm.kernels.triton.experts import expert_rows, many_pairs
from nanovllm.kernels.triton.experts.experts import Activation, Stack, adapted_experts, add_up
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

    Where there are kernels of their own for dense weights, gates are not rounded, and an expert's
    outputs are; with the kernels for any weights it is the other way round.
    """
    is_dense = isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
    if activation is not None or not is_dense or not expert_rows.takes(x):
        return adapted_experts(x, gate_up, down, expert_ids, shares, num_experts, None, activation)
    assert isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
    ids = expert_ids.contiguous()
    dense = x, gate_up, down, ids, shares.contiguous(), num_experts
    if many_pairs.takes(x, down, ids.numel(), num_experts):
        return add_up(x, many_pairs.multiply(*dense), ids, len(down))
    return add_up(x, expert_rows.multiply(*dense, dtype=x.dtype), ids, len(down))


def lora_down(x: torch.Tensor, weights: LowRank, groups: RowGroups) -> torch.Tensor:
    """`x @ A.T` for rows with an adapter, in float32, in as many parts as for few rows."""
    return lora.down_in_parts(lora.num_parts(1, x.shape[1]), x, weights, groups)
