"""The activation of a gated feed-forward layer."""

import torch
import torch.nn.functional as F


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` [T, I] of x [T, 2 * I]: the gate's columns come before those of up."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
