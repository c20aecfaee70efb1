"""The gate of an attention layer's output."""

import torch

from nanovllm.kernels.plain.sigmoid import sigmoid


def sigmoid_and_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x [T, N] times sigmoid(gate), which is rounded to its type first. It replaces x."""
    return x.mul_(sigmoid(gate))
