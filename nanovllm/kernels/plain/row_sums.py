"""Sums of rows, for means and norms that no other operation has."""

import torch


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """The sum of each row of x [T, N], in float32: [T, 1]."""
    return x.sum(-1, keepdim=True, dtype=torch.float32)
