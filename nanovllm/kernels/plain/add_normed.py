"""RMSNorm of a residual and of another norm."""

import torch

from nanovllm.kernels.plain.rms_norm import add_rms_norm, rms_norm


def add_normed(
    x: torch.Tensor,
    inner_weight: torch.Tensor,
    inner_eps: float,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of `residual + inner`, and this sum, for the inner norm of x."""
    return add_rms_norm(rms_norm(x, inner_weight, inner_eps), residual, weight, eps)
