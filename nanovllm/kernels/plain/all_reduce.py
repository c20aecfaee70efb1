"""Sums of all ranks' addends, fused with the operations that follow them in a layer.

These functions only define the Triton kernels; ranks without them add up in other ways. T rows of N
elements.
"""

import torch
import torch.nn.functional as F

from nanovllm.kernels.operands.scaled import Scaled
from nanovllm.kernels.plain.rms_norm import rms_norm


def all_reduce(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of `parts` [T, N], added in order in float32, and rounded once."""
    return _sum(parts).to(parts[0].dtype)


def embedding(ids: torch.Tensor, tables: list[torch.Tensor]) -> torch.Tensor:
    """The table's rows for token ids [T]; `tables` are the ranks' parts of it, in order."""
    return F.embedding(ids, torch.cat(tables))


def add_rms_norm(
    parts: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of the sum of `parts` and the residual, and this sum, which is rounded once."""
    total = (_sum(parts) + residual.float()).to(residual.dtype)
    return rms_norm(total, weight, eps), total


def add_scaled(
    parts: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, Scaled]:
    """The sum of `parts` and the residual, and the same sum scaled by the next norm's weight."""
    total = (_sum(parts) + residual.float()).to(residual.dtype)
    squares = total.float().square().sum(dim=1, keepdim=True)
    return total, Scaled(total * weight, squares, eps)


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total
