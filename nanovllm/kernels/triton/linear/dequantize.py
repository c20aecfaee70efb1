"""Convert quantized weights to plain ones, for products of many rows."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.triton.linear.arranged import WORD, ArrangedMatrix
from nanovllm.kernels.triton.linear.unpack import unpack_plain

BLOCK_N = 32


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    weight, out_ptr, scales_ptr, zeros_ptr, row, n, k, inside,
    N: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    COLUMNS: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Scale the numbers [n, k] of a matrix and store them."""
    at = (row // N * (GROUPS * COLUMNS) + n // SCALE_ROWS)[:, None]
    if GROUP:
        at += (k // GROUP)[None, :] * COLUMNS
    inside = inside[:, None] & (k < K)[None, :]
    if ZEROS:
        weight -= tl.load(zeros_ptr + at, mask=inside, other=0).to(tl.float32)
    weight *= tl.load(scales_ptr + at, mask=inside, other=0.0).to(tl.float32)
    out_at = out_ptr + row[:, None] * K + k[None, :]
    tl.store(out_at, weight.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    words_ptr, scales_ptr, zeros_ptr, out_ptr, num_rows,
    N: tl.constexpr, K: tl.constexpr, ROW_WORDS: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, SCALE_ROWS: tl.constexpr, KIND: tl.constexpr,
    ZEROS: tl.constexpr, INNER: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Convert INNER bytes of BLOCK_N rows; the rows are those of all matrices of a stack."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < num_rows
    first = tl.program_id(1) * INNER
    b = tl.arange(0, INNER)
    w = first // 4 + tl.arange(0, INNER // 4)
    words_at = words_ptr + row[:, None] * ROW_WORDS + w[None, :]
    words = tl.load(words_at, mask=inside[:, None], other=0)
    n = row % N
    if KIND == "int4":
        k = first * 2 + b
        _store(unpack_plain(words, KIND, 0), out_ptr, scales_ptr, zeros_ptr, row, n, k, inside,
               N, K, GROUPS, GROUP, COLUMNS, SCALE_ROWS, ZEROS)  # fmt: skip
        _store(unpack_plain(words, KIND, 1), out_ptr, scales_ptr, zeros_ptr, row, n, k + INNER,
               inside, N, K, GROUPS, GROUP, COLUMNS, SCALE_ROWS, ZEROS)  # fmt: skip
    else:
        _store(unpack_plain(words, KIND, 0), out_ptr, scales_ptr, zeros_ptr, row, n, first + b,
               inside, N, K, GROUPS, GROUP, COLUMNS, SCALE_ROWS, ZEROS)  # fmt: skip


def dequantize(weight: ArrangedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [..., N, K], each element rounded once. Reads the codes, writes the matrix.

    Its columns are in the order of the codes.
    """
    *_, size_out, size_in = weight.shape
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    row_bytes = weight.codes.shape[-1]
    num_rows = weight.codes.numel() // row_bytes
    _dequantize_kernel[(cdiv(num_rows, BLOCK_N), row_bytes // weight.inner)](
        weight.words, weight.scales, weight.scales if weight.zeros is None else weight.zeros, out,
        num_rows, N=size_out, K=size_in, ROW_WORDS=row_bytes // WORD, BLOCK_N=BLOCK_N,
        **weight.constants,
    )  # fmt: skip
    return out
