"""Layers of experts: each of T tokens takes K of the feed-forward layers ("experts")."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.kernels.operands.low_rank import PairAdditions
from nanovllm.kernels.plain.silu_and_mul import silu_and_mul

# One matrix for each expert: stacked, or a list of matrices in another form.
Weights = torch.Tensor | Sequence[Any]


def experts(
    x: torch.Tensor,
    gate_up: Weights,
    down: Weights,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
    activation: Callable[[torch.Tensor], torch.Tensor] = silu_and_mul,
    linear: Callable[[torch.Tensor, Any], torch.Tensor] = F.linear,
) -> torch.Tensor:
    """For each row of x [T, hidden], the sum of its K experts' outputs, weighted by `shares`.

    The weights are gate_up [E, 2 * I, hidden] and down [E, hidden, I]. A row's experts are
    expert_ids [T, K], with shares [T, K]; sums are float32. These E experts may be a part of all
    `num_experts`: ids count from the first expert of the part, and an id below 0 or from E on is an
    expert of another rank, which adds nothing here. The rows of one expert go through `linear`
    together, and the weights of an expert without rows are not read. A row adds up its experts in
    their order, so its sum does not depend on the other rows. Syncs.
    """
    assert len(down) <= num_experts
    per_row = expert_ids.shape[1]
    flat_shares = shares.flatten()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, chosen in pairs_by_expert(expert_ids, len(down)):
        rows = chosen // per_row
        y = linear(activation(linear(x[rows], gate_up[expert])), down[expert])
        out.index_add_(0, rows, y.float() * flat_shares[chosen, None])
    return out.to(x.dtype)


def adapted_experts(
    x: torch.Tensor,
    gate_up: Weights,
    down: Weights,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
    additions: PairAdditions,
    activation: Callable[[torch.Tensor], torch.Tensor] = silu_and_mul,
    linear: Callable[[torch.Tensor, Any], torch.Tensor] = F.linear,
) -> torch.Tensor:
    """As `experts`, with adapters added to the outputs of both matrices.

    The result of a row without an adapter is bit for bit the same. Peak memory: a row for each
    pair.
    """
    assert len(down) <= num_experts
    num_pairs, per_row = expert_ids.numel(), expert_ids.shape[1]
    members = [*pairs_by_expert(expert_ids, len(down))]
    inner = outputs = x.new_zeros(num_pairs, 0)
    for index, (expert, chosen) in enumerate(members):
        part = linear(x[chosen // per_row], gate_up[expert])
        inner = inner if index else x.new_zeros(num_pairs, part.shape[1])
        inner[chosen] = part
    if members:
        additions.add_gates(x, inner)
        inner = activation(inner)
    outputs = torch.zeros(num_pairs, x.shape[1], dtype=torch.float32, device=x.device)
    for expert, chosen in members:
        part = linear(inner[chosen], down[expert]).float()
        outputs[chosen] = part * shares.flatten()[chosen, None]
    if members:
        additions.add_outputs(inner, outputs, shares.flatten())
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for _, chosen in members:
        out.index_add_(0, chosen // per_row, outputs[chosen])
    return out.to(x.dtype)


def pairs_by_expert(expert_ids: torch.Tensor, num_here: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Each expert that some row takes, with its pairs of a row and an expert."""
    ids, pairs = expert_ids.flatten().sort(stable=True)
    bounds = torch.searchsorted(ids, torch.arange(-1, num_here, device=ids.device), right=True)
    for expert, (start, stop) in enumerate(pairwise(bounds.tolist())):
        if start < stop:
            yield expert, pairs[start:stop]
