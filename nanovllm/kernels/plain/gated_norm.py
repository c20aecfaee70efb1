"""RMS norms of groups of channels, with a gate before or after."""

import torch
import torch.nn.functional as F


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, gate_first: bool
) -> torch.Tensor:
    """Normalize each group of x [T, G, D], and multiply by silu(gate) after, or with `gate_first`.

    `gate` has the shape of `x`. `weight` [G, D] or [D] multiplies the normalized values, which are
    rounded to the type of `x` first.
    """
    opened = F.silu(gate.float())
    values = x.float() * opened if gate_first else x.float()
    values = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    values = weight * values.to(x.dtype)
    return values if gate_first else (values * opened).to(x.dtype)
