"""Low-rank additions on the CPU: a few matrix products of PyTorch for each adapter that has rows.

The names of sizes are the twin's.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.kernels.low_rank import LowRank


class Member(NamedTuple):
    """A group that has rows; `rows` is None if it has all."""

    group: int
    rows: torch.Tensor | None


class RowGroups(NamedTuple):
    """The groups that have rows, and the number of all rows."""

    members: list[Member]
    num_rows: int


def group_rows(group_ids: torch.Tensor, num_groups: int) -> RowGroups:
    """Find the rows of each group once for a step; ids outside [0, num_groups) have no group."""
    ids = group_ids.tolist()
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(ids):
        if 0 <= group < num_groups:
            rows.setdefault(group, []).append(row)
    members = [
        Member(group, None if len(own) == len(ids) else torch.tensor(own))
        for group, own in sorted(rows.items())
    ]
    return RowGroups(members, len(ids))


def lora_down(x: torch.Tensor, weights: LowRank, groups: RowGroups) -> torch.Tensor:
    """The twin's, in one part. Reads each A once."""
    down = x.new_empty(groups.num_rows, weights.a.shape[1])
    per_row = groups.num_rows // max(1, len(x))
    for group, rows in groups.members:
        own = x
        if per_row > 1:
            every = torch.arange(groups.num_rows) if rows is None else rows
            own = x.index_select(0, every // per_row)
        elif rows is not None:
            own = x.index_select(0, rows)
        for part, rank in enumerate(weights.ranks[group].tolist()):
            if rank:
                columns = slice(part * weights.max_rank, part * weights.max_rank + rank)
                product = F.linear(own, weights.a[group, columns])
                if rows is None:
                    down[:, columns] = product
                else:
                    down[rows, columns] = product
    return down[None]


def lora_up(
    down: torch.Tensor,
    weights: LowRank,
    groups: RowGroups,
    out: torch.Tensor,
    shares: torch.Tensor | None = None,
) -> None:
    """The twin's, with one rounding. Reads each B once."""
    whole = down[0] if len(down) == 1 else down.sum(0)
    for group, rows in groups.members:
        own, left = (whole, out) if rows is None else (whole[rows], out.index_select(0, rows))
        first = 0
        for part, rank in enumerate(weights.ranks[group].tolist()):
            if rank:
                start, columns = part * weights.max_rank, slice(first, first + weights.sizes[part])
                factors = own[:, start : start + rank].to(weights.b.dtype)
                b, target = weights.b[group, :rank, columns], left[:, columns]
                if shares is None and target.dtype == b.dtype == torch.float32:
                    target.addmm_(factors, b)
                else:  # products of bfloat16 that are not packed are slower
                    added = factors.float() @ b.float()
                    if shares is not None:
                        added *= (shares if rows is None else shares[rows])[:, None]
                    target += added
            first += weights.sizes[part]
        if rows is not None:
            out.index_copy_(0, rows, left)
