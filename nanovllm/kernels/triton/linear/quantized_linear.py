"""Linear layers with quantized weights: choose the kernels by the number of rows and the format."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.triton.linear.arranged import ArrangedMatrix, arrange
from nanovllm.kernels.triton.linear.dequantize import dequantize
from nanovllm.kernels.triton.linear.quantize_rows import RoundedRows
from nanovllm.kernels.triton.linear.quantized_rows import launch
from nanovllm.kernels.triton.linear.rounded_linear import rounded_linear, rounding_of
from nanovllm.kernels.triton.linear.row_outputs import RowOperands
from nanovllm.kernels.triton.linear.row_tiles import most_rows

__all__ = ["ArrangedMatrix", "arrange", "quantized_linear", "rounding_of"]


def quantized_linear(
    x: torch.Tensor | RoundedRows, weight: ArrangedMatrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias` for x [T, K]. Nothing syncs, and shapes decide which kernels run.

    Few rows are multiplied by the codes, without rounding: the bytes moved are the codes. More rows
    are rounded to the codes' type if the weight and the device allow it; `rounding_of(weight, T)`
    may already have rounded them. If not, and if there are many rows, the whole matrix is converted
    to x's type first: it is also the peak memory.
    """
    if isinstance(x, RoundedRows):
        return rounded_linear(x, weight, bias)
    if weight.order is not None:
        x = x[:, weight.order]
    x = x.contiguous()
    rounding = rounding_of(weight, len(x))
    if rounding is not None:
        return rounded_linear(rounding.rows(x), weight, bias)
    if len(x) <= most_rows(weight, x.dtype) and weight.has_rows_kernel:
        out = x.new_empty(len(x), weight.size_out)
        if len(x):
            launch(RowOperands(x, bias, out), weight)
        return out
    return F.linear(x, dequantize(weight, x.dtype), bias)
