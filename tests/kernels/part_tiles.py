"""A kernel that leaves the second of two parts of a tile. It needs Triton."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.common import leave_parts


@triton.jit
def _leave_kernel(parts_ptr, arrivals_ptr, TWO: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 16)
    ones = tl.full([16], 1.0, tl.float32)
    leave_parts(ones, ones, parts_ptr, arrivals_ptr, 0, 1, 16, at, at < 16, 2, TWO)


def leave_second_part(parts: torch.Tensor, two: int) -> None:
    """Write rows of `parts`, which have 16 numbers."""
    _leave_kernel[(1,)](parts, torch.zeros(1, dtype=torch.int32, device=parts.device), TWO=two)
