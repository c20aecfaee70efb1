"""Linear layers with one order of sums, for any number of rows.

T rows, K inputs, N outputs.

**The contract.** An output is the sum of the products of groups of 16 consecutive inputs. The
groups are added one after the other, from the first one on, in the float32 accumulator of the
tensor cores. Then the bias is added in float32, and the result is rounded once.

On an NVIDIA H200, tensor cores add a group's products at once, so neither the order within a group,
nor the size of a tile, nor the instruction (`mma` or `wgmma`) changes a bit. Zeros do not, either.

cuBLAS adds in this order, too, unless it divides the inputs among programs: for few rows or few
outputs. For many rows it is faster than our kernel. So when a weight is loaded, its products are
compared with those of the kernel, bit for bit, for some numbers of rows. Steps are then divided
into pieces of the numbers that agree; the kernel computes the rows that are left.
"""

import functools
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.triton.common import can_copy_tiles, dot
from nanovllm.kernels.triton.linear.arranged import MOST_ROW_TILES, ArrangedMatrix
from nanovllm.kernels.triton.linear.dequantize import dequantize
from nanovllm.kernels.triton.linear.few_rows import launch_tiles
from nanovllm.kernels.triton.linear.few_rows_tiles import LEAST
from nanovllm.kernels.triton.linear.quantized_rows import launch
from nanovllm.kernels.triton.linear.row_outputs import RowOperands
from nanovllm.kernels.triton.linear.row_tiles import choose_tiles

# The numbers of rows for which cuBLAS is compared. Fewer rows are left to the kernel.
COMPARED = (16384, 8192, 6144, 4096, 3072, 2048, 1536, 1024, 768, 512, 384, 256)
MOST_BYTES = 1 << 30  # of the rows that are compared, and of their products
LEAST_OUTPUTS = 1 << 17  # of a comparison: one in about 10,000 differs if orders do, once rounded


class OrderedWeight(NamedTuple):
    """A weight [N, K], and the numbers of rows for which cuBLAS has the kernel's order of sums.

    cuBLAS was compared with a bias, or without one: `has_bias`.
    """

    weight: torch.Tensor
    agreed: tuple[int, ...] = ()  # from the largest one on
    has_bias: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape


def arrange_plain(
    weight: torch.Tensor,
    is_table: bool = False,  # noqa: ARG001
    has_bias: bool = False,
) -> OrderedWeight:
    """The operand of `ordered_linear`. It shares the weight's memory, also a table's.

    A product with a bias is right without `has_bias`, too, and slower.
    """
    shape = weight.shape[0], weight.shape[1]
    agreed = agreeing(shape, weight.dtype, weight.device, has_bias)
    return OrderedWeight(weight, agreed, has_bias)


def plain_of(operand: object) -> torch.Tensor | None:
    """The plain weight of an operand; None if it is quantized."""
    return operand.weight if isinstance(operand, OrderedWeight) else None


@functools.cache
def agreeing(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, has_bias: bool
) -> tuple[int, ...]:
    """The numbers of COMPARED rows for which cuBLAS and the kernel give the same bits. Syncs.

    Peak memory: a weight, and MOST_BYTES.
    """
    if device.type != "cuda":
        return ()
    random = torch.Generator(device).manual_seed(0)
    size_out, size_in = shape
    compared = comparable(shape, dtype)
    if not compared:
        return ()

    def values(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=random, device=device, dtype=dtype)

    x, weight = values(compared[0], size_in), values(size_out, size_in)
    bias = values(size_out) if has_bias else None
    expected = _multiply(x, weight, bias)
    return tuple(
        rows for rows in compared if torch.equal(F.linear(x[:rows], weight, bias), expected[:rows])
    )


def comparable(shape: tuple[int, int], dtype: torch.dtype) -> list[int]:
    """The numbers of COMPARED rows whose outputs are enough to tell two orders apart."""
    size_out, size_in = shape
    row_bytes = dtype.itemsize * (size_in + 2 * size_out)
    return [
        rows
        for rows in COMPARED
        if rows * row_bytes <= MOST_BYTES and rows * size_out >= LEAST_OUTPUTS
    ]


def ordered_linear(
    x: torch.Tensor, weight: OrderedWeight | ArrangedMatrix, bias: torch.Tensor | None
) -> torch.Tensor:
    """`x @ weight.T + bias`, each row in the order of the contract."""
    if isinstance(weight, ArrangedMatrix):
        return _quantized_linear(x, weight, bias)
    plain = weight.weight
    is_compared = x.is_contiguous() and weight.has_bias == (bias is not None)
    pieces = pieces_of(len(x), weight.agreed) if is_compared else []
    if not pieces:
        return _multiply(x, plain, bias)
    if pieces == [len(x)]:
        return F.linear(x, plain, bias)
    out = x.new_empty(len(x), len(plain))
    start = 0
    for rows in pieces:
        part = slice(start, start + rows)
        if bias is None:
            torch.mm(x[part], plain.t(), out=out[part])
        else:
            torch.addmm(bias, x[part], plain.t(), out=out[part])
        start += rows
    if start < len(x):
        _multiply(x[start:], plain, bias, out[start:])
    return out


def pieces_of(num_rows: int, agreed: tuple[int, ...]) -> list[int]:
    """The numbers of rows that cuBLAS computes, one after the other, of `num_rows` rows."""
    pieces = []
    for rows in agreed:
        count, num_rows = divmod(num_rows, rows)
        pieces += [rows] * count
    return pieces


def _multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply by a kernel; its tiles depend on the number of rows, its order of sums does not."""
    if out is None:
        out = x.new_empty(len(x), len(weight))
    if not len(x):
        return out
    if can_copy_tiles(x.device) and _fits_tiles(x, weight):
        launch_tiles(RowOperands(x, bias, out), weight)
        return out
    size_out, size_in = weight.shape
    block_t = 16 if len(x) <= 16 else 64
    _chain_kernel[(cdiv(len(x), block_t), cdiv(size_out, 64))](
        x, weight, x if bias is None else bias, out, len(x), x.stride(0), weight.stride(0),
        N=size_out, K=size_in, BIAS=bias is not None, BLOCK_T=block_t, BLOCK_N=64, BLOCK_K=64,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def _quantized_linear(
    x: torch.Tensor, weight: ArrangedMatrix, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply by codes. Rows are not rounded; as many parts as for few rows are added up."""
    if weight.order is not None:
        x = x[:, weight.order]
    x = x.contiguous()
    if not weight.has_rows_kernel:
        return _multiply(x, dequantize(weight, x.dtype), bias)
    splits = choose_tiles(1, weight, False, x.dtype).splits
    out = x.new_empty(len(x), weight.size_out)
    rows = MOST_ROW_TILES * max(1, choose_tiles(len(x), weight, False, x.dtype).rows)
    for start in range(0, len(x), rows):
        part = slice(start, min(start + rows, len(x)))
        tiles = choose_tiles(part.stop - start, weight, False, x.dtype)
        ordered = replace(tiles, splits=splits, scales_each=True)
        launch(RowOperands(x[part], bias, out[part]), weight, ordered)
    return out


def _fits_tiles(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel of `few_rows` takes the operands."""
    whole = x.is_contiguous() and weight.is_contiguous() and x.data_ptr() % 16 == 0
    whole &= len(x) * len(weight) < 1 << 31  # its offsets have 32 bits
    return x.dtype.itemsize == 2 and whole and not any(n % LEAST for n in weight.shape)


@triton.jit(do_not_specialize=["num_rows"])
def _chain_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, x_stride, weight_stride,
    N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile of outputs, of any sizes and type."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_at = x_ptr + t.to(tl.int64)[:, None] * x_stride
    weight_at = weight_ptr + n.to(tl.int64)[:, None] * weight_stride
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K))[None, :]
        x = tl.load(x_at + k, mask=(t < num_rows)[:, None] & (k < K), other=0.0)
        weight = tl.load(weight_at + k, mask=(n < N)[:, None] & (k < K), other=0.0)
        acc = dot(x, tl.trans(weight), acc)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    real = (t < num_rows)[:, None] & (n < N)[None, :]
    out_at = out_ptr + t.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=real)
