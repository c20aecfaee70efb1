"""Define the rows of embeddings whose weights are in GGUF's blocks."""

import torch

from nanovllm.kernels.operands.block_matrix import BlockMatrix
from nanovllm.kernels.plain.dequantize_blocks import dequantize


def block_rows(weight: BlockMatrix, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight's rows with these ids [T], as [T, K] of a float type."""
    return dequantize(weight.codes[ids], weight.kind).flatten(1).to(dtype)
