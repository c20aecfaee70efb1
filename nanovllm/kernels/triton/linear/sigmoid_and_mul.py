"""The gate of an attention layer's output."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.triton.common import INTERPRETED

BLOCK = 1024


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    """PyTorch's: with its exponential and its division, equal to the last bit."""
    power = tl.exp(-x) if INTERPRETED else libdevice.exp(-x)
    return tl.div_rn(1.0, 1.0 + power)


@triton.jit
def _sigmoid_and_mul_kernel(  # type: ignore[no-untyped-def]
    x_ptr, gate_ptr, x_stride, gate_stride, size, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + n, mask=n < size, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + n, mask=n < size, other=0.0)
    opened = sigmoid(gate.to(tl.float32)).to(gate.dtype)  # rounded as in plain PyTorch
    out = x.to(tl.float32) * opened.to(tl.float32)
    tl.store(x_ptr + row * x_stride + n, out.to(x.dtype), mask=n < size)


def sigmoid_and_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x [T, N] times sigmoid(gate). It replaces x. Reads both once, writes x once.

    Rows of the gate may be parts of longer rows.
    """
    num_rows, size = x.shape
    assert x.stride(1) == gate.stride(1) == 1
    _sigmoid_and_mul_kernel[(num_rows, cdiv(size, BLOCK))](
        x, gate, x.stride(0), gate.stride(0), size, BLOCK=BLOCK, num_warps=4
    )
    return x
