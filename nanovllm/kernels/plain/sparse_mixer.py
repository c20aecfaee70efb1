"""The choice of experts of SparseMixer, in inference: one expert after the other."""

import torch


def sparse_mixer(
    outputs: torch.Tensor, per_token: int, margin: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares [T, K] and the ids [T, K] of experts, from a router's outputs [T, E].

    The expert with the largest output is taken, then that with the largest of the others, and so
    on. Its share is its part of the softmax over the experts that were not taken before, and that
    are close to it: with its output m, those with outputs s for which (m - s) / max(|s|, m) is at
    most `margin`. The shares of a token do not sum to one.
    """
    left, shares, ids = outputs, [], []
    for _ in range(per_token):
        best, at = left.max(dim=-1, keepdim=True)
        is_far = (best - outputs) / outputs.abs().clamp(min=best) > margin
        close = left.masked_fill(is_far, -torch.inf)
        shares.append(close.softmax(dim=-1).gather(-1, at))
        ids.append(at)
        left = left.scatter(-1, at, -torch.inf)
    return torch.cat(shares, dim=-1), torch.cat(ids, dim=-1)
