"""RMSNorm, with or without the residual add before it, or one more norm before that.

T rows of N elements.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import next_power_of_2
from nanovllm.kernels.triton.common import await_inputs, early, let_next_begin, rows_with_room


@triton.jit
def norm_row(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, sum_ptr, eps, row, x_stride, residual_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """The norm of a row in float32, in registers, with zeros after its end."""
    n = tl.arange(0, BLOCK)
    inside = n < N
    weight = tl.load(weight_ptr + n, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + n, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * residual_stride + n, mask=inside, other=0.0)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * N + n, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)
    return x * scale * weight


@triton.jit
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, eps, x_stride, residual_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program normalises one row."""
    row = tl.program_id(0).to(tl.int64)
    await_inputs(EARLY)
    let_next_begin(EARLY)
    norm = norm_row(x_ptr, residual_ptr, weight_ptr, sum_ptr, eps, row, x_stride, residual_stride,
                    N, BLOCK, ADD)  # fmt: skip
    n = tl.arange(0, BLOCK)
    tl.store(out_ptr + row * N + n, norm.to(out_ptr.dtype.element_ty), mask=n < N)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm of each row of x [T, N], in float32 inside. Reads [T, N] once, writes it once.

    Norms have memory after their last row, for products of few rows.
    """
    num_rows, size = x.shape
    assert x.stride(1) == weight.stride(0) == 1
    out = rows_with_room(num_rows, size, x)
    _rms_norm_kernel[(num_rows,)](
        x, x, weight, out, out, eps, x.stride(0), 0,
        N=size, BLOCK=next_power_of_2(size), ADD=False, num_warps=num_warps_of(size),
        **early(x.device),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm of `x + residual`, and the rounded sum. Reads [T, N] twice, writes it twice."""
    num_rows, size = x.shape
    assert x.stride(1) == residual.stride(1) == weight.stride(0) == 1
    out = rows_with_room(num_rows, size, x)
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    _rms_norm_kernel[(num_rows,)](
        x, residual, weight, out, total, eps, x.stride(0), residual.stride(0),
        N=size, BLOCK=next_power_of_2(size), ADD=True, num_warps=num_warps_of(size),
        **early(x.device),
    )  # fmt: skip
    return out, total


@triton.jit
def _add_normed_kernel(  # type: ignore[no-untyped-def]
    x_ptr, inner_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, inner_eps, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program adds one row. The inner norm is rounded, as a kernel of its own would."""
    n = tl.arange(0, BLOCK)
    inside, at = n < N, tl.program_id(0).to(tl.int64) * N + n
    inner_weight = tl.load(inner_ptr + n, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + n, mask=inside, other=0.0).to(tl.float32)
    await_inputs(EARLY)
    let_next_begin(EARLY)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    inner = x * tl.rsqrt(tl.sum(x * x, axis=0) / N + inner_eps) * inner_weight
    inner = inner.to(sum_ptr.dtype.element_ty).to(tl.float32)
    total = (inner + residual).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + at, total, mask=inside)
    x = total.to(tl.float32)
    norm = x * tl.rsqrt(tl.sum(x * x, axis=0) / N + eps) * weight
    tl.store(out_ptr + at, norm.to(out_ptr.dtype.element_ty), mask=inside)


def add_normed(
    x: torch.Tensor,
    inner_weight: torch.Tensor,
    inner_eps: float,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of `residual + inner`, and this sum, for the inner norm of x [T, N]."""
    num_rows, size = x.shape
    assert x.is_contiguous() and residual.is_contiguous()
    out, total = rows_with_room(num_rows, size, x), torch.empty_like(x)
    _add_normed_kernel[(num_rows,)](
        x, inner_weight, residual, weight, out, total, inner_eps, eps,
        N=size, BLOCK=next_power_of_2(size), num_warps=num_warps_of(size, most=16),
        **early(x.device),
    )  # fmt: skip
    return out, total


def num_warps_of(size: int, most: int = 8) -> int:
    """The warps of a program that holds a row of this size in registers."""
    return min(most, max(1, next_power_of_2(size) // 256))
