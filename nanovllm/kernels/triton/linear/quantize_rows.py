"""Round rows to e4m3 or int8, with a scale for each row or for each group of its inputs.

A separate kernel does this, or the kernel of the norm or the activation before it. The codes are in
the order of the `ArrangedMatrix` that they are multiplied by.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.plain.quantize_rows import LEAST, MOST
from nanovllm.kernels.triton.attention.kv_codes import largest_of
from nanovllm.kernels.triton.common import (
    INTERPRETED,
    await_inputs,
    early,
    let_next_begin,
    rows_with_room,
)
from nanovllm.kernels.triton.linear.rms_norm import norm_row, num_warps_of
from nanovllm.kernels.triton.linear.silu_and_mul import activated

LEAST_SCALED = tl.constexpr(LEAST)
BLOCK_OF_GROUPS = 2048  # inputs of a program, if a row has several scales


@triton.jit
def store_rounded(  # type: ignore[no-untyped-def]
    x, codes_ptr, scales_ptr, scale_ptr, row, first,
    N: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
    STATIC: tl.constexpr,
):  # fmt: skip
    """Round BLOCK float32 inputs of a row from input `first` on; they are 0 after its end.

    N is the number of codes of a row. GROUP divides BLOCK.
    """
    groups = tl.reshape(x, (BLOCK // GROUP, GROUP))
    if STATIC:
        scales = tl.zeros([BLOCK // GROUP], tl.float32) + tl.load(scale_ptr).to(tl.float32)
    else:
        top = tl.maximum(largest_of(groups, 1), LEAST_SCALED, tl.PropagateNan.ALL)
        scales = top * (1 / MOST)
    inverse = 1.0 / scales if INTERPRETED else tl.div_rn(1.0, scales)
    scaled = tl.minimum(tl.maximum(groups * inverse[:, None], -MOST), MOST)
    if codes_ptr.dtype.element_ty == tl.int8:  # round to the nearest whole number, ties to even
        scaled = (scaled + 12582912.0) - 12582912.0
    of_16 = tl.reshape(scaled.to(codes_ptr.dtype.element_ty), (BLOCK // 16, 2, 4, 2))
    codes = tl.reshape(tl.permute(of_16, (0, 2, 3, 1)), (BLOCK,))  # as `in_word_order`
    n = first + tl.arange(0, BLOCK)
    tl.store(codes_ptr + row * N + n, codes, mask=n < N)
    at = first // GROUP + tl.arange(0, BLOCK // GROUP)
    num_scales: tl.constexpr = (N + GROUP - 1) // GROUP
    tl.store(scales_ptr + row * num_scales + at, scales, mask=at < num_scales)


@triton.jit
def _quantize_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, scales_ptr, scale_ptr, x_stride,
    K: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    MOST: tl.constexpr, STATIC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    k = first + tl.arange(0, BLOCK)
    await_inputs(EARLY)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    store_rounded(x, codes_ptr, scales_ptr, scale_ptr, row, first, N, GROUP, BLOCK, MOST, STATIC)
    let_next_begin(EARLY)


@triton.jit
def _rounded_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, sum_ptr, codes_ptr, scales_ptr, scale_ptr, eps, x_stride,
    residual_stride,
    K: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    MOST: tl.constexpr, STATIC: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the norm, round it to the type of x (as if it were stored), and then to codes."""
    row = tl.program_id(0).to(tl.int64)
    await_inputs(EARLY)
    norm = norm_row(x_ptr, residual_ptr, weight_ptr, sum_ptr, eps, row, x_stride, residual_stride,
                    K, BLOCK, ADD)  # fmt: skip
    norm = norm.to(x_ptr.dtype.element_ty).to(tl.float32)
    store_rounded(norm, codes_ptr, scales_ptr, scale_ptr, row, 0, N, GROUP, BLOCK, MOST, STATIC)
    let_next_begin(EARLY)


@triton.jit
def _rounded_activation_kernel(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, scales_ptr, scale_ptr, x_stride,
    K: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    MOST: tl.constexpr, STATIC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    await_inputs(EARLY)
    out = activated(x_ptr + row * x_stride, first + tl.arange(0, BLOCK), K)
    out = out.to(x_ptr.dtype.element_ty).to(tl.float32)
    store_rounded(out, codes_ptr, scales_ptr, scale_ptr, row, first, N, GROUP, BLOCK, MOST, STATIC)
    let_next_begin(EARLY)


@dataclass(frozen=True, slots=True)
class RoundingKernels:
    """How the rows for a matrix are rounded, and the kernels that make such rows.

    The methods have the names of `Kernels`. Each returns codes [T, padded], with zeros after the
    inputs, and float32 scales [T, groups].
    """

    dtype: torch.dtype  # the type of the codes
    group: int  # inputs with one scale, a power of two; 0: the whole row
    scale: torch.Tensor | None  # a fixed scale for all rows
    padded: int  # codes of a row, a multiple of 16

    def rows(self, x: torch.Tensor) -> "RoundedRows":
        """Codes and scales of x [T, K], as the plain definition. Reads x once."""
        assert x.stride(1) == 1
        rounded, options, block = self._new(len(x), x.shape[1], x, whole=False)
        _quantize_rows_kernel[(len(x), cdiv(self.padded, block))](
            x, rounded.codes, rounded.scales, self._scale_or(x), x.stride(0), **options,
            num_warps=min(8, max(1, block // 512)), **early(x.device),
        )  # fmt: skip
        return rounded

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> "RoundedRows":
        """The rounded norm of each row of x [T, K]. Reads x once, writes half as many bytes."""
        return self._norm(x, None, weight, eps)[0]

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple["RoundedRows", torch.Tensor]:
        """The rounded norm of `x + residual`, and this sum."""
        return self._norm(x, residual, weight, eps)

    def silu_and_mul(self, x: torch.Tensor) -> "RoundedRows":
        """The rounded `silu(gate) * up` of x [T, 2 * K]. Reads x once, writes a quarter of it."""
        assert x.stride(1) == 1
        rounded, options, block = self._new(len(x), x.shape[1] // 2, x, whole=False)
        _rounded_activation_kernel[(len(x), cdiv(self.padded, block))](
            x, rounded.codes, rounded.scales, self._scale_or(x), x.stride(0), **options,
            num_warps=min(16, max(1, block // 512)), **early(x.device),
        )  # fmt: skip
        return rounded

    def _norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple["RoundedRows", torch.Tensor]:
        size = x.shape[1]
        assert x.stride(1) == weight.stride(0) == 1
        total = (
            x if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        )
        before = x if residual is None else residual
        assert before.stride(1) == 1
        rounded, options, _ = self._new(len(x), size, x, whole=True)
        _rounded_norm_kernel[(len(x),)](
            x, before, weight, total, rounded.codes, rounded.scales, self._scale_or(x), eps,
            x.stride(0), before.stride(0), **options, ADD=residual is not None,
            num_warps=num_warps_of(size), **early(x.device),
        )  # fmt: skip
        return rounded, total

    def _new(
        self, num_rows: int, size: int, like: torch.Tensor, whole: bool
    ) -> tuple["RoundedRows", dict[str, object], int]:
        """Allocate rounded rows; also return kernel constants, and the inputs of a program."""
        block = next_power_of_2(self.padded)
        block = min(block, BLOCK_OF_GROUPS) if self.group and not whole else block
        group = self.group or block
        codes = rows_with_room(num_rows, self.padded, like, self.dtype)
        num_scales = cdiv(self.padded, group)
        scales = rows_with_room(num_rows, num_scales, like, torch.float32)
        options: dict[str, object] = dict(
            K=size, N=self.padded, GROUP=group, BLOCK=block, MOST=MOST[self.dtype],
            STATIC=self.scale is not None,
        )  # fmt: skip
        return RoundedRows(codes, scales, like.dtype), options, block

    def _scale_or(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.scale is None else self.scale


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Rows [T, K] as codes and scales."""

    codes: torch.Tensor  # [T, padded]
    scales: torch.Tensor  # [T, groups], float32
    dtype: torch.dtype  # the type of the rows before rounding, and of their products
