"""Experts that gelu gates."""

import torch
import torch.nn.functional as F

from nanovllm.layers.experts import Experts


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up` [N, I] of x [N, 2 * I], with tanh in the approximation of gelu."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


class GeluExperts(Experts):
    """The feed-forward layers of all experts, with gelu instead of silu."""

    activation = staticmethod(gelu_and_mul)
