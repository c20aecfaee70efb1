"""Define the results of linear layers with quantized weights. T rows, K inputs, N outputs."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix


def dequantize(weight: QuantizedMatrix, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The matrix [..., N, K] of the codes' values, computed in float32.

    Its columns are in the order of the codes. Peak memory: a few float32 copies of the matrix.
    """
    values = weight.codes.float()
    if weight.zeros is not None:
        values -= _of_each(weight.zeros, weight)
    return (values * _of_each(weight.scales, weight)).to(dtype)


def dense_matrix(weight: QuantizedMatrix, size_in: int) -> torch.Tensor:
    """The matrix [N, K] in float32, with its columns in the order of the `size_in` inputs."""
    values = dequantize(weight)
    if weight.order is None:
        return values
    dense = values.new_zeros(len(values), size_in)
    return dense.index_add_(1, weight.order, values)


def quantized_linear(
    x: torch.Tensor, weight: QuantizedMatrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ dequantize(weight).T + bias`, where the matrix is rounded to x's type."""
    if weight.order is not None:
        x = x[:, weight.order]
    return F.linear(x, dequantize(weight, x.dtype), bias)


def _of_each(values: torch.Tensor, weight: QuantizedMatrix) -> torch.Tensor:
    """Expand a value for each block to a value for each element, in float32."""
    size_out, size_in = weight.codes.shape[-2:]
    rows = values.float().repeat_interleave(weight.block[0], dim=-2)[..., :size_out, :]
    return rows.repeat_interleave(weight.block[1], dim=-1)[..., :size_in]
