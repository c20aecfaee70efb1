"""The choice of experts from a router's outputs, for every kind of router."""

import torch

from nanovllm.kernels.operands.routing import ExpertGroups, Routing
from nanovllm.kernels.plain.sigmoid import sigmoid


def choose_experts(
    outputs: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares [T, K] and the ids [T, K] of the experts chosen by outputs [T, E] in float32.

    `bias`, [E] or [1, E], is added for the choice. Ties are decided as `torch.topk` does.
    """
    if routing.scores == "sparse mixer":
        from nanovllm.kernels.plain.sparse_mixer import sparse_mixer

        return sparse_mixer(outputs, routing.per_token, routing.margin)
    if routing.soft_cap is not None:
        outputs = (outputs / routing.soft_cap).tanh() * routing.soft_cap
    scores = outputs
    if routing.scores != "softmax of chosen":
        scores = sigmoid(outputs) if routing.scores == "sigmoid" else outputs.softmax(dim=-1)
    choice = scores if bias is None else scores + bias
    if routing.groups is not None:
        choice = _in_best_groups(choice, routing.groups)
    ids = choice.topk(routing.per_token, dim=-1).indices
    shares = scores.gather(-1, ids)
    if routing.scores == "softmax of chosen":
        shares = shares.softmax(dim=-1)
    elif routing.normalized:
        total = shares.sum(dim=-1, keepdim=True) + routing.tiny
        shares = shares / (total.clamp(min=routing.least) if routing.least else total)
    return shares if routing.scale == 1.0 else shares * routing.scale, ids


def _in_best_groups(choice: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
    """The scores [T, E], with -inf for the experts of all groups except the best ones."""
    grouped = choice.view(len(choice), groups.number, -1)
    values = grouped.topk(groups.best, dim=-1).values.sum(dim=-1)
    best = values.topk(groups.chosen, dim=-1).indices
    is_out = torch.ones_like(values, dtype=torch.bool).scatter_(-1, best, value=False)
    return grouped.masked_fill(is_out.unsqueeze(-1), -torch.inf).view(choice.shape)
