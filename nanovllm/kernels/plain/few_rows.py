"""Linear layers fused with the norm, activation or residual add next to them, in float32 inside.

They only define the Triton kernels for decode steps of few rows; plain PyTorch does not use them.
T rows, K inputs, N outputs.
"""

import torch
import torch.nn.functional as F

from nanovllm.kernels.operands.scaled import ExpertWeights, Scaled
from nanovllm.kernels.plain.experts import experts
from nanovllm.kernels.plain.gelu_and_mul import gelu_and_mul
from nanovllm.kernels.plain.route import route
from nanovllm.kernels.plain.silu_and_mul import silu_and_mul

Rows = Scaled | torch.Tensor  # tensors are normed
ACTIVATIONS = {"silu": silu_and_mul, "gelu": gelu_and_mul}


def scaled_linear(x: Rows, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`norm @ weight.T + bias` for weight [N, K]."""
    return _wide_linear(_normed(x), weight, bias).to(_dtype(x))


def scaled_gated(
    x: Rows, weight: torch.Tensor, bias: torch.Tensor | None = None, gate: str = "silu"
) -> torch.Tensor:
    """`silu(gate) * up` of `norm @ weight.T + bias` for weight [2 * N, K]; or another `gate`."""
    return ACTIVATIONS[gate](_wide_linear(_normed(x), weight, bias)).to(_dtype(x))


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


def weigh(x: Scaled, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`rows` times the sigmoid of the norm's product with weight [1, K]."""
    return (rows.float() * (x.normed() @ weight.float().T).sigmoid()).to(rows.dtype)


def _normed(x: Rows) -> torch.Tensor:
    return x.normed() if isinstance(x, Scaled) else x.float()


def _dtype(x: Rows) -> torch.dtype:
    return x.product.dtype if isinstance(x, Scaled) else x.dtype


def _scaled_sum(total: torch.Tensor, norm: torch.Tensor, eps: float) -> tuple[torch.Tensor, Scaled]:
    squares = total.float().square().sum(dim=1, keepdim=True)
    return total, Scaled(total * norm, squares, eps)


def _wide_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight.float(), None if bias is None else bias.float())
