"""Activations of parts without a gate, with the same bits at any place of a batch.

PyTorch's own functions compute the last numbers of each thread's part by other instructions. These
take longer: silu and gelu by tanh copy x, so that kernels of gated layers compute it.
"""

from collections.abc import Callable, Mapping

import torch

from nanovllm.kernels.cpu.gelu_and_mul import gelu_and_mul
from nanovllm.kernels.cpu.silu_and_mul import silu_and_mul


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)), for x [T, N]."""
    return silu_and_mul(_times_one(x))


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Gelu with tanh in its approximation, for x [T, N]."""
    return gelu_and_mul(_times_one(x))


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Gelu in float32. PyTorch's error function does not depend on the place."""
    wide = x.float()
    return (wide.mul(0.5**0.5).erf_().add_(1).mul_(wide).mul_(0.5)).to(x.dtype)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)). PyTorch's logarithm and exponential do not depend on the place."""
    return x.exp().log1p_().where(x <= 20, x)


def _times_one(x: torch.Tensor) -> torch.Tensor:
    """Gates x and ups of one."""
    return torch.cat([x, torch.ones_like(x)], 1)


IN_ONE_ORDER: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": gelu, "gelu_new": gelu_tanh, "gelu_fast": gelu_tanh, "gelu_pytorch_tanh": gelu_tanh,
    "silu": silu,
}  # fmt: skip
