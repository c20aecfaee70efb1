"""Define the results of linear layers whose weights are in GGUF's blocks.

T rows, K inputs, N outputs.
"""

import torch

from nanovllm.kernels.operands.block_matrix import BlockMatrix
from nanovllm.kernels.plain.dequantize_blocks import dequantize

__all__ = ["block_linear", "dequantize"]

SOME_VALUES = 1 << 22  # of the weight, which are float32 at one time


def block_linear(
    x: torch.Tensor, weight: BlockMatrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias` [T, N] of x [T, K], computed in float32 and rounded to x's type.

    Peak memory: 16 MiB of the weight's values in float32, times four.
    """
    size_out, size_in = weight.shape
    rows, some = x.float(), max(1, SOME_VALUES // size_in)
    out = x.new_empty(len(x), size_out)
    for start in range(0, size_out, some):
        part = slice(start, start + some)
        products = rows @ dequantize(weight.codes[part], weight.kind).flatten(1).T
        out[:, part] = products if bias is None else products + bias[part].float()
    return out
