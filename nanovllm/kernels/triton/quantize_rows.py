"""Rows rounded to e4m3 or int8, with a scale for each row or for each group of its inputs."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.plain.quantize_rows import LEAST, MOST
from nanovllm.kernels.triton.common import INTERPRETED

LEAST_SCALED = tl.constexpr(LEAST)


@triton.jit
def store_rounded(  # type: ignore[no-untyped-def]
    x, codes_ptr, scales_ptr, scale_ptr, first,
    N: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
    STATIC: tl.constexpr,
):  # fmt: skip
    """Round BLOCK float32 inputs of a row, which are 0 after its end, from input `first` on.

    Pointers are those of the row; N is the number of its codes. GROUP divides BLOCK.
    """
    groups = tl.reshape(x, (BLOCK // GROUP, GROUP))
    if STATIC:
        scales = tl.zeros([BLOCK // GROUP], tl.float32) + tl.load(scale_ptr).to(tl.float32)
    else:
        top = tl.maximum(tl.max(tl.abs(groups), axis=1), LEAST_SCALED)
        scales = top * (1 / MOST)
    inverse = 1.0 / scales if INTERPRETED else tl.div_rn(1.0, scales)
    scaled = tl.minimum(tl.maximum(groups * inverse[:, None], -MOST), MOST)
    if codes_ptr.dtype.element_ty == tl.int8:  # to the nearest whole number, ties to the even one
        scaled = (scaled + 12582912.0) - 12582912.0
    n = first + tl.arange(0, BLOCK)
    codes = tl.reshape(scaled, (BLOCK,)).to(codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + n, codes, mask=n < N)
    at = first // GROUP + tl.arange(0, BLOCK // GROUP)
    tl.store(scales_ptr + at, scales, mask=at * GROUP < N)


@triton.jit
def _quantize_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, scales_ptr, scale_ptr, x_stride, num_scales,
    K: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    MOST: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    k = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    store_rounded(x, codes_ptr + row * N, scales_ptr + row * num_scales, scale_ptr, first,
                  N, GROUP, BLOCK, MOST, STATIC)  # fmt: skip


def quantize_rows(
    x: torch.Tensor,
    dtype: torch.dtype,
    group: int = 0,
    scale: torch.Tensor | None = None,
    padded: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of x [T, K], as the twin defines them. Groups are powers of two.

    Rows of codes are `padded` to that size with zeros. Reads x once, and writes a byte for each
    input.
    """
    num_rows, size = x.shape
    assert x.stride(1) == 1
    padded = padded or size
    codes = torch.empty(num_rows, padded, dtype=dtype, device=x.device)
    scales = x.new_empty(num_rows, triton.cdiv(padded, group or padded), dtype=torch.float32)
    block = triton.next_power_of_2(padded)
    block = min(block, 2048) if group else block
    _quantize_rows_kernel[(num_rows, triton.cdiv(padded, block))](
        x, codes, scales, scales if scale is None else scale, x.stride(0), scales.shape[1],
        K=size, N=padded, GROUP=group or block, BLOCK=block, MOST=MOST[dtype],
        STATIC=scale is not None, num_warps=min(8, max(1, block // 512)),
    )  # fmt: skip
    return codes, scales
