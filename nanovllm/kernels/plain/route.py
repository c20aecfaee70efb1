"""The router of a layer of experts: which K of its E experts each of T tokens takes."""

import torch
import torch.nn.functional as F


def route(
    x: torch.Tensor, weight: torch.Tensor, per_token: int, normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares [T, K] in float32 and the ids [T, K] of the rows' experts.

    The scores are `x @ weight.T` in float32, for x [T, hidden] and weight [E, hidden]: rounding
    must not decide between experts.
    """
    return choose(F.linear(x.float(), weight.float()), per_token, normalized)


def choose(
    scores: torch.Tensor, per_token: int, normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The K largest probabilities of scores [T, E], and their places.

    If `normalized`, those of a row sum to one.
    """
    shares, ids = scores.softmax(dim=-1).topk(per_token, dim=-1)
    if normalized:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return shares, ids
