"""4-bit matrices as GGUF's Q4_0, for the CPU kernels that multiply bytes.

Q4_0 has our groups and codes, so its values are the same. Its kernels are faster for bfloat16
inputs: they multiply integers for few rows, and use AMX for many.
"""

import torch

from nanovllm.formats.format import LayerWeight
from nanovllm.kernels.cpu import processor
from nanovllm.kernels.operands.block_matrix import BlockMatrix
from nanovllm.kernels.operands.block_types import BLOCK_TYPES
from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix

Q4_0 = BLOCK_TYPES["Q4_0"]


def fastest(weight: QuantizedMatrix, dtype: torch.dtype) -> LayerWeight:
    """The same weight in blocks if that is faster for inputs of `dtype`, otherwise as it is."""
    on_cpu = weight.codes.device.type == "cpu"
    if on_cpu and dtype == torch.bfloat16 and _fits(weight) and processor.multiplies_bytes():
        return in_blocks(weight)
    return weight


def _fits(weight: QuantizedMatrix) -> bool:
    """Whether Q4_0 has the weight's values: scales are float16 if that type has all of them."""
    return (
        (weight.bits, weight.block, weight.scales.dtype) == (4, (1, Q4_0.size), torch.float16)
        and weight.codes.dim() == 2 and not weight.codes.shape[1] % Q4_0.size
        and weight.zeros is None and weight.order is None
    )  # fmt: skip


def in_blocks(weight: QuantizedMatrix) -> BlockMatrix:
    """A weight that fits, in blocks. Peak memory: 3 bytes a weight, including the codes."""
    num_rows = len(weight.codes)
    codes = (weight.codes + 8).view(torch.uint8).view(num_rows, -1, 2, Q4_0.size // 2)
    scales = weight.scales.contiguous().unsqueeze(-1).view(torch.uint8)
    halves = codes[..., 0, :] | codes[..., 1, :] << 4
    return BlockMatrix(torch.cat([scales, halves], dim=-1), Q4_0)
