"""Linear layers fused with the norm, activation or residual add next to them, in float32 inside.

They only define the Triton kernels for decode steps of few rows; plain PyTorch does not use them.
T rows, K inputs, N outputs.
"""

import torch
import torch.nn.functional as F

from nanovllm.kernels.operands.scaled import ExpertWeights, Scaled
from nanovllm.kernels.plain.experts import experts
from nanovllm.kernels.plain.route import route
from nanovllm.kernels.plain.silu_and_mul import silu_and_mul


def scaled_linear(
    x: Scaled, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`norm @ weight.T + bias` for weight [N, K]."""
    return _wide_linear(x.normed(), weight, bias).to(x.product.dtype)


def scaled_gated(x: Scaled, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`silu(gate) * up` of `norm @ weight.T + bias` for weight [2 * N, K]."""
    return silu_and_mul(_wide_linear(x.normed(), weight, bias)).to(x.product.dtype)


def add_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, Scaled]:
    """`residual + x @ weight.T + bias`, and the same sum scaled by the next norm's weight."""
    total = residual.float() + _wide_linear(x.float(), weight, bias)
    return _scaled_sum(total.to(x.dtype), norm, eps)


def add_experts(
    x: Scaled, weights: ExpertWeights, residual: torch.Tensor, norm: torch.Tensor, eps: float
) -> tuple[torch.Tensor, Scaled]:
    """The residual plus the experts' outputs, and the same sum scaled by the next norm's weight.

    The router is given by its weight [E, hidden].
    """
    normed = x.normed()
    shares, ids = route(normed, weights.router, weights.per_token, weights.normalized)
    gate_up, down = weights.gate_up.float(), weights.down.float()
    total = residual.float() + experts(normed, gate_up, down, ids, shares, len(gate_up))
    return _scaled_sum(total.to(x.product.dtype), norm, eps)


def _scaled_sum(total: torch.Tensor, norm: torch.Tensor, eps: float) -> tuple[torch.Tensor, Scaled]:
    squares = total.float().square().sum(dim=1, keepdim=True)
    return total, Scaled(total * norm, squares, eps)


def _wide_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight.float(), None if bias is None else bias.float())
