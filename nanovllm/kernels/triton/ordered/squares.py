"""Sums of squares with one order, for any number of rows: one program adds up a row."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import next_power_of_2
from nanovllm.kernels.triton.linear.rms_norm import num_warps_of


@triton.jit
def _squares_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, x_stride, N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The tile has the shape of a row, whatever the number of programs."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(x * x, axis=0))


def squares(x: torch.Tensor) -> torch.Tensor:
    """The sum of the squares of each row of x [T, N], in float32: [T, 1]."""
    num_rows, size = x.shape
    assert x.stride(1) == 1
    out = x.new_empty(num_rows, 1, dtype=torch.float32)
    if num_rows:
        _squares_kernel[(num_rows,)](
            x, out, x.stride(0), N=size, BLOCK=next_power_of_2(size), num_warps=num_warps_of(size)
        )
    return out
