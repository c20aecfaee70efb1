"""The activation of a feed-forward layer that gelu gates."""

import torch
import torch.nn.functional as F


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up` [T, I] of x [T, 2 * I], with tanh in the approximation of gelu."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
