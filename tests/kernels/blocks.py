"""Random weights in GGUF's blocks for the tests of kernels."""

import torch

from nanovllm.kernels.operands.block_matrix import BlockMatrix
from nanovllm.kernels.operands.block_types import BLOCK_TYPES

# The bytes at which each type has float16 numbers, and the largest integers that multiply them.
HALVES = {
    "Q4_0": ((0, 8),), "Q4_1": ((0, 15), (2, 1)), "Q5_0": ((0, 16),), "Q5_1": ((0, 31), (2, 1)),
    "Q8_0": ((0, 128),), "Q2_K": ((80, 45), (82, 15)), "Q3_K": ((108, 128),),
    "Q4_K": ((0, 945), (2, 63)), "Q5_K": ((0, 1953), (2, 63)), "Q6_K": ((208, 4096),),
    "IQ4_NL": ((0, 127),), "IQ4_XS": ((0, 4064),), "MXFP4": (),
}  # fmt: skip


def random_blocks(name: str, size_out: int, size_in: int, seed: int = 0) -> BlockMatrix:
    """A matrix with random bytes, whose products are about as large as its inputs."""
    kind = BLOCK_TYPES[name]
    assert size_in % kind.size == 0
    rng = torch.Generator().manual_seed(seed)
    shape = (size_out, size_in // kind.size)
    codes = torch.randint(0, 256, (*shape, kind.num_bytes), generator=rng, dtype=torch.uint8)
    for at, largest in HALVES[name]:
        scales = (torch.rand(*shape, 1, generator=rng) - 0.5) * 4 / (largest * size_in**0.5)
        codes[..., at : at + 2] = scales.half().view(torch.uint8)
    if name == "MXFP4":  # the logarithm of the scale plus 128
        codes[..., :1] = torch.randint(118, 123, (*shape, 1), generator=rng, dtype=torch.uint8)
    return BlockMatrix(codes, kind)
