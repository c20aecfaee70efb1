"""Linear layers with quantized weights: the way for each number of rows and each format."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.triton.arranged import ArrangedMatrix, arrange
from nanovllm.kernels.triton.dequantize import dequantize
from nanovllm.kernels.triton.quantized_rows import MOST_ROWS, launch
from nanovllm.kernels.triton.rounded_linear import can_round, rounded_linear

__all__ = ["ArrangedMatrix", "arrange", "quantized_linear"]


def quantized_linear(
    x: torch.Tensor, weight: ArrangedMatrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias` for x [T, K]. Nothing syncs, and shapes decide which kernels run.

    Few rows are multiplied by the codes as they are: bytes moved are the codes. More rows are
    rounded to the codes' type, if the weight and the device allow it; else the whole matrix is
    made in x's type, which is also the peak memory.
    """
    if weight.order is not None:
        x = x[:, weight.order]
    x = x.contiguous()
    if len(x) <= MOST_ROWS and weight.has_rows_kernel:
        out = x.new_empty(len(x), weight.size_out)
        if len(x):
            launch(x, weight, bias, out)
        return out
    if can_round(weight, x.device):
        return rounded_linear(x, weight, bias)
    return F.linear(x, dequantize(weight, x.dtype), bias)
