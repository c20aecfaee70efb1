"""Linear layers with the norm, activation or residual add beside them fused in, in float32 inside.

Plain PyTorch has no use for them: they define the Triton kernels for decode steps of few rows.
T rows, K inputs, N outputs.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanovllm.kernels.plain.silu_and_mul import silu_and_mul


@dataclass(frozen=True)
class Scaled:
    """Rows [T, K] times a norm's weight, not yet divided by each row's root mean square.

    The missing factor of a row is 1 / sqrt(sum(squares) / K + eps). A linear layer can apply it to
    its outputs instead.
    """

    product: torch.Tensor  # of the rows and the norm's weight
    squares: torch.Tensor  # [T, any], float32: parts of the rows' sums of squares
    eps: float

    def normed(self) -> torch.Tensor:
        """The norm, in float32."""
        squares = self.squares.sum(dim=1, keepdim=True)
        return self.product.float() * torch.rsqrt(squares / self.product.shape[1] + self.eps)


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
    total = (residual.float() + _wide_linear(x.float(), weight, bias)).to(x.dtype)
    squares = total.float().square().sum(dim=1, keepdim=True)
    return total, Scaled(total * norm, squares, eps)


def _wide_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight.float(), None if bias is None else bias.float())
