"""Convert `BlockPlanes` to plain weights: all rows for products of many rows, or some rows.

T rows, K inputs, N outputs.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.triton.linear.block_planes import RUN, BlockPlanes
from nanovllm.kernels.triton.linear.block_values import lanes, load_values

BLOCK_N = 64  # rows of a program
WARPS = 4


@triton.jit(do_not_specialize=["num_rows"])
def _block_rows_kernel(  # type: ignore[no-untyped-def]
    low_ptr, high_ptr, scales_ptr, mins_ptr, supers_ptr, ids_ptr, out_ptr, num_rows,
    K: tl.constexpr, RUN: tl.constexpr, IDS: tl.constexpr, BLOCK_N: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, CENTER: tl.constexpr, NUMBERS: tl.constexpr,
    GROUPS: tl.constexpr, SCALES: tl.constexpr, SCALE_CENTER: tl.constexpr, MINS: tl.constexpr,
    WEIGHT_N: tl.constexpr,
):  # fmt: skip
    """Convert a run of inputs of BLOCK_N rows: those of ids if IDS, else all rows in order."""
    first = tl.program_id(0) * BLOCK_N
    run = tl.program_id(1)
    n, other_n = lanes(first, num_rows, BLOCK_N)
    if IDS:
        n = tl.load(ids_ptr + n).to(tl.int32)
        other_n = tl.load(ids_ptr + other_n).to(tl.int32)
    values = load_values(low_ptr, high_ptr, scales_ptr, mins_ptr, supers_ptr, n, other_n, run,
                         LOW, HIGH, CENTER, NUMBERS, GROUPS, SCALES, SCALE_CENTER, MINS,
                         WEIGHT_N)  # fmt: skip
    row = first + tl.arange(0, BLOCK_N)
    inside = row < num_rows
    k = run * RUN + tl.arange(0, RUN)
    real = inside[:, None]
    if K % RUN:
        real &= (k < K)[None, :]
    at = row.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(out_ptr + at, values.to(out_ptr.dtype.element_ty), mask=real)


def dequantize_blocks(weight: BlockPlanes, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [N, K], each value rounded once. Reads the codes, writes the matrix."""
    return _launch(weight, None, weight.shape[0], dtype)


def block_rows(weight: BlockPlanes, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight's rows with these ids [T], as [T, K] of a float type."""
    return _launch(weight, ids, len(ids), dtype)


def _launch(
    weight: BlockPlanes, ids: torch.Tensor | None, num_rows: int, dtype: torch.dtype
) -> torch.Tensor:
    out = torch.empty(num_rows, weight.shape[1], dtype=dtype, device=weight.device)
    if num_rows:
        _block_rows_kernel[(cdiv(num_rows, BLOCK_N), cdiv(weight.shape[1], RUN))](
            *weight.tensors, weight.low if ids is None else ids.contiguous(), out, num_rows,
            K=weight.shape[1], RUN=RUN, IDS=ids is not None, BLOCK_N=BLOCK_N, num_warps=WARPS,
            **weight.constants,
        )  # fmt: skip
    return out
