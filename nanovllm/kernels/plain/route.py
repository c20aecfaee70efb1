"""The router of a layer of experts: it chooses K of E experts for each of T tokens."""

import torch
import torch.nn.functional as F


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    per_token: int,
    normalized: bool,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares [T, K] in float32 and the ids [T, K] of the rows' experts.

    The scores are `x @ weight.T + bias` for x [T, hidden], weight [E, hidden] and bias [E], in
    float32, because rounding must not decide between experts.
    """
    return choose(F.linear(x.float(), weight.float(), bias), per_token, normalized)


def choose(
    scores: torch.Tensor, per_token: int, normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The K largest probabilities of scores [T, E], and their experts.

    If `normalized`, the K probabilities of a row sum to one.
    """
    shares, ids = scores.softmax(dim=-1).topk(per_token, dim=-1)
    if normalized:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return shares, ids
