"""Linear layers and embeddings with weights in GGUF's blocks: choose the kernels."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.triton.linear import block_dots, block_products
from nanovllm.kernels.triton.linear.block_dequantize import block_rows, dequantize_blocks
from nanovllm.kernels.triton.linear.block_planes import BlockPlanes, arrange_blocks
from nanovllm.kernels.triton.linear.rounded_rows import RowWords
from nanovllm.kernels.triton.linear.row_outputs import RowOperands

__all__ = ["BlockPlanes", "arrange_blocks", "block_linear", "block_rows"]

MOST_ROWS = 256  # for more rows, it is faster to dequantize the weight first


def block_linear(
    x: torch.Tensor | RowWords, weight: BlockPlanes, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias` for x [T, K]. Nothing syncs, and shapes decide which kernels run.

    Up to MOST_ROWS rows of 16-bit numbers are multiplied by the codes: the bytes moved are the
    codes. For more rows, and for float32, the whole matrix is converted to x's type first: it is
    also the peak memory.
    """
    if isinstance(x, RowWords):
        out = torch.empty(x.num_rows, weight.shape[0], dtype=x.dtype, device=x.words.device)
        block_dots.launch(RowOperands(x.words, bias, out), weight, x)
        return out
    if len(x) > MOST_ROWS or x.dtype == torch.float32:
        return F.linear(x, dequantize_blocks(weight, x.dtype), bias)
    out = x.new_empty(len(x), weight.shape[0])
    if len(x):
        launch(RowOperands(x.contiguous(), bias, out), weight)
    return out


def launch(rows: RowOperands, weight: BlockPlanes) -> torch.Tensor:
    """Launch the kernels for rows of 16 bits. Returns the sums of squares, if there are addends."""
    if block_dots.can_dot(len(rows.x), weight):
        return block_dots.launch(rows, weight)
    return block_products.launch(rows, weight)
