"""The activation of a gated feed-forward layer."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.triton.common import await_inputs, early, let_next_begin

BLOCK = 1024


@triton.jit
def gated(gate, up):  # type: ignore[no-untyped-def]
    """`silu(gate) * up` of sums in float32, without rounding in between, for fused kernels."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gated_as_stored(gate, up):  # type: ignore[no-untyped-def]
    """`silu(gate) * up` in float32 of numbers as they are stored, rounded as in plain PyTorch."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return silu.to(tl.float32) * up.to(tl.float32)


@triton.jit
def activated(x_ptr, n, size):  # type: ignore[no-untyped-def]
    """Outputs n of one row in float32, zeros after its end."""
    inside = n < size
    gate = tl.load(x_ptr + n, mask=inside, other=0.0)
    up = tl.load(x_ptr + size + n, mask=inside, other=0.0)
    return gated_as_stored(gate, up)


@triton.jit
def activate(x_ptr, out_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute BLOCK outputs of one row."""
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    out = activated(x_ptr, n, size)
    tl.store(out_ptr + n, out.to(out_ptr.dtype.element_ty), mask=n < size)


@triton.jit
def _silu_and_mul_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, x_stride, size, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    let_next_begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    activate(x_ptr + row * x_stride, out_ptr + row * size, size, BLOCK)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` [T, I] of x [T, 2 * I]. Reads x once, writes half as many bytes."""
    num_rows, size = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1
    out = x.new_empty(num_rows, size)
    _silu_and_mul_kernel[(num_rows, cdiv(size, BLOCK))](
        x, out, x.stride(0), size, BLOCK=BLOCK, num_warps=8, **early(x.device)
    )
    return out
