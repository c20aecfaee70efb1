"""Add adapters (low-rank products) to a layer's output; groups of rows have different adapters.

T rows, or T pairs of a row of x and one of its T / len(x) experts. Other sizes are named as in
`LowRank`.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.kernels.operands.low_rank import LowRank


def group_rows(group_ids: torch.Tensor, num_groups: int) -> Any:  # noqa: ARG001
    """Find the rows of each group for `lora_down` and `lora_up`, from group ids [T] int32.

    A row with an id below 0 or from `num_groups` on has no adapter.
    """
    return group_ids


def lora_down(x: torch.Tensor, weights: LowRank, groups: Any) -> torch.Tensor:
    """`x @ A.T` for the rows with an adapter, as parts [S, T, P * R] that the caller must add up.

    Values of other rows, and values beyond a projection's rank, are undefined. Syncs.
    """
    down = x.new_zeros(len(groups), weights.a.shape[1])
    per_row = len(groups) // max(1, len(x))
    for group, rows in _members(groups, len(weights.a)):
        part = F.linear(x[rows // per_row], weights.a[group])
        down[rows] = part
    return down[None]


def lora_up(
    down: torch.Tensor,
    weights: LowRank,
    groups: Any,
    out: torch.Tensor,
    shares: torch.Tensor | None = None,
) -> None:
    """Add `down @ B.T` to the rows of `out` [T, N] with an adapter, times `shares` [T] if given.

    The sum of the parts `down` is rounded to the weights' type; everything else is float32. Syncs.
    """
    size = weights.max_rank
    for group, rows in _members(groups, len(weights.b)):
        whole = down[:, rows].sum(0, dtype=torch.float32).to(weights.b.dtype).float()
        b_parts = torch.split(weights.b[group], [*weights.sizes], 1)
        parts = zip(torch.split(whole, size, 1), b_parts, strict=True)
        ranks = weights.ranks[group].tolist()
        added = torch.cat(
            [part[:, :r] @ b[:r].float() for r, (part, b) in zip(ranks, parts, strict=True)], 1
        )
        if shares is not None:
            added *= shares[rows, None]
        out[rows] = (out[rows].float() + added).to(out.dtype)


def _members(group_ids: torch.Tensor, num_groups: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each group that has rows, with its rows."""
    for group in torch.unique(group_ids).tolist():
        if 0 <= group < num_groups:
            yield group, (group_ids == group).nonzero()[:, 0]
