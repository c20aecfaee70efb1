"""The activation of a feed-forward layer that gelu gates."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv

BLOCK = 1024


@triton.jit
def gelu(gate):  # type: ignore[no-untyped-def]
    """The approximation by tanh, g * (1 + tanh(u)) / 2, which is g / (1 + exp(-2 u))."""
    twice_u = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 * sqrt(2 / pi)
    return gate / (1.0 + tl.exp(-twice_u))


@triton.jit
def gated_by_gelu(gate, up):  # type: ignore[no-untyped-def]
    """`gelu(gate) * up` of sums in float32, without rounding in between, for fused kernels."""
    return gelu(gate) * up


@triton.jit
def _gelu_and_mul_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, x_stride, size, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK outputs of one row."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < size
    gate = tl.load(x_ptr + row * x_stride + n, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * x_stride + size + n, mask=inside, other=0.0)
    rounded = gelu(gate.to(tl.float32)).to(gate.dtype)  # as in plain PyTorch
    out = rounded.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * size + n, out.to(out_ptr.dtype.element_ty), mask=inside)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up` [T, I] of x [T, 2 * I]. Reads x once, writes half as many bytes."""
    num_rows, size = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1
    out = x.new_empty(num_rows, size)
    _gelu_and_mul_kernel[(num_rows, cdiv(size, BLOCK))](
        x, out, x.stride(0), size, BLOCK=BLOCK, num_warps=8
    )
    return out
