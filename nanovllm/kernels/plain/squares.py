"""Sums of squares, for norms whose rows are divided among ranks."""

import torch


def squares(x: torch.Tensor) -> torch.Tensor:
    """The sum of the squares of each row of x [T, N], in float32: [T, 1]."""
    return x.float().square().sum(-1, keepdim=True)
