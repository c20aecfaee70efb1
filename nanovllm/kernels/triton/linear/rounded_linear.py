"""Multiply rounded rows by quantized weights, on the tensor cores of the codes' type.

T rows, K inputs, N outputs. Sums of int8 products are integers, those of e4m3 products are float32.
Scales multiply the sums afterwards: for each row and output, or for each 128 inputs with block
scales.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.triton.common import (
    INTERPRETED,
    ROOM,
    await_inputs,
    can_copy_tiles,
    capability,
    early,
    leave_parts,
    let_next_begin,
    num_multiprocessors,
    sum_parts,
    tiles_of,
    with_room,
)
from nanovllm.kernels.triton.linear.arranged import ArrangedMatrix
from nanovllm.kernels.triton.linear.quantize_rows import RoundedRows, RoundingKernels
from nanovllm.kernels.triton.linear.row_tiles import FEW_ROUNDED, RowTiles

BLOCK_K = 128
TOGETHER = 8  # tiles of rows for which neighbouring programs use the same tile of weights
E4M3_AT = 89  # from this compute capability on, tensor cores multiply e4m3
SMALL = 64  # rows and outputs of a tile
MOST_SPLITS, LEAST_STEPS = 4, 8  # the most parts of K, and the fewest steps of each
ALIGNED = 16  # PyTorch's product needs sizes that are multiples of this


@triton.jit
def _product(x, weight):  # type: ignore[no-untyped-def]
    """The product of codes; the interpreter computes it in float32."""
    if INTERPRETED:
        return tl.dot(x.to(tl.float32), tl.trans(weight).to(tl.float32))
    if x.dtype == tl.int8:
        return tl.dot(x, tl.trans(weight), out_dtype=tl.int32)
    return tl.dot(x, tl.trans(weight))


@triton.jit
def _rounded_kernel(  # type: ignore[no-untyped-def]
    x_ptr, x_tiles, weight_ptr, weight_tiles, row_scales_ptr, scales_ptr, bias_ptr, out_ptr,
    parts_ptr, arrivals_ptr, num_rows,
    N: tl.constexpr, K: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
    SCALE_ROWS: tl.constexpr, BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, TOGETHER: tl.constexpr, COPIED: tl.constexpr, STAGES: tl.constexpr,
    SPLIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a part of K for one tile of outputs."""
    tiles_t = tl.cdiv(num_rows, BLOCK_T)
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    first = program // (TOGETHER * tiles_n) * TOGETHER
    height = tl.minimum(tiles_t - first, TOGETHER)
    inside = program % (TOGETHER * tiles_n)
    first_t = (first + inside % height) * BLOCK_T
    first_n = inside // height * BLOCK_N
    t = first_t + tl.arange(0, BLOCK_T)
    n = first_n + tl.arange(0, BLOCK_N)
    n_at = tl.minimum(n, N - 1)
    t_at = tl.minimum(t, num_rows - 1).to(tl.int64)
    await_inputs(EARLY)
    if x_ptr.dtype.element_ty == tl.int8 and not INTERPRETED:
        acc = tl.zeros([BLOCK_T, BLOCK_N], tl.int32)
    else:
        acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    b = tl.arange(0, BLOCK_K)
    SHARE: tl.constexpr = (K // BLOCK_K + SPLIT - 1) // SPLIT * BLOCK_K  # noqa: N806
    split = tl.program_id(1)
    begin = split * SHARE
    end = tl.minimum(begin + SHARE, K)
    ALONE: tl.constexpr = SCALE_ROWS % BLOCK_N == 0  # noqa: N806
    if BLOCKS and ALONE:  # a tile has one scale, which is loaded one iteration before its use
        scale_at = scales_ptr + first_n // SCALE_ROWS
        next_scale = tl.load(scale_at + tl.minimum(begin, K - 1) // BLOCK_K * COLUMNS).to(
            tl.float32
        )
    for k in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        if COPIED:
            x = x_tiles.load([first_t, k])
            weight = weight_tiles.load([first_n, k])
        else:
            x = tl.load(x_ptr + t_at[:, None] * K + (k + b)[None, :])
            weight = tl.load(weight_ptr + n_at.to(tl.int64)[:, None] * K + (k + b)[None, :])
        if BLOCKS:
            row_scales = tl.load(row_scales_ptr + t_at * (K // BLOCK_K) + k // BLOCK_K)
            if ALONE:
                row_scales *= next_scale
                following = tl.minimum(k // BLOCK_K + 1, K // BLOCK_K - 1)
                next_scale = tl.load(scale_at + following * COLUMNS).to(tl.float32)
                acc += _product(x, weight) * row_scales[:, None]
            else:
                scales = tl.load(scales_ptr + n_at // SCALE_ROWS + k // BLOCK_K * COLUMNS)
                scale = row_scales[:, None] * scales.to(tl.float32)[None, :]
                acc += _product(x, weight) * scale
        else:
            acc += _product(x, weight)
    out_at = t.to(tl.int64)[:, None] * N + n[None, :]
    real = (t < num_rows)[:, None] & (n < N)[None, :]
    size = num_rows.to(tl.int64) * N
    finishes = leave_parts(acc, acc, parts_ptr, arrivals_ptr, program, split, size, out_at, real,
                           SPLIT, False)  # fmt: skip
    let_next_begin(EARLY)
    if finishes:
        out, _ = sum_parts(acc, acc, parts_ptr, arrivals_ptr, program, size, out_at, real, SPLIT,
                           False, False)  # fmt: skip
        if not BLOCKS:
            row_scales = tl.load(row_scales_ptr + t_at)[:, None]
            out *= row_scales * tl.load(scales_ptr + n_at).to(tl.float32)[None, :]
        if BIAS:
            out += tl.load(bias_ptr + n_at).to(tl.float32)[None, :]
        tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=real)


def can_round(weight: ArrangedMatrix, device: torch.device) -> bool:
    """Whether the device's tensor cores can multiply rounded rows by this weight."""
    if not weight.rounds_inputs or weight.zeros is not None or len(weight.shape) != 2:
        return False
    if weight.kind == "e4m3":
        known = bool(INTERPRETED) or capability(device) >= E4M3_AT
        return known and weight.group in (0, BLOCK_K)
    return weight.kind == "int8" and weight.group == 0


def rounding_of(weight: ArrangedMatrix, num_rows: int) -> RoundingKernels | None:
    """How `num_rows` rows are rounded before the product with this weight; None if they are not."""
    if num_rows <= FEW_ROUNDED or weight.order is not None or not can_round(weight, weight.device):
        return None
    dtype = torch.int8 if weight.kind == "int8" else torch.float8_e4m3fn
    return RoundingKernels(dtype, weight.group, weight.input_scale, weight.padded_in)


def rounded_linear(
    x: RoundedRows, weight: ArrangedMatrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias` for rows [T, K] that were rounded for this weight."""
    if _takes_pytorch(x, weight):
        matrix = weight.codes.view(torch.float8_e4m3fn).t()
        columns = weight.scales.view(1, -1)
        # Multiply whole tiles: 136 rows take 72 us, 256 take 45 us.
        whole = with_room(x.codes, ROOM), with_room(x.scales, ROOM)
        out = torch._scaled_mm(whole[0], matrix, whole[1], columns, out_dtype=x.dtype)
        out = out[: len(x.codes)]
        return out if bias is None else out.add_(bias)
    return multiply(x, weight, bias)


def _takes_pytorch(x: RoundedRows, weight: ArrangedMatrix) -> bool:
    """Whether PyTorch has this product, and is faster, as with many tiles."""
    if weight.kind != "e4m3" or weight.group or not x.codes.is_cuda:
        return False
    tiles = _small_tiles(len(x.codes), weight.size_out)
    many = len(x.codes) > SMALL and tiles > 2 * num_multiprocessors(weight.device)
    return many and weight.size_out % ALIGNED == 0 and x.dtype == torch.bfloat16


def multiply(
    x: RoundedRows,
    weight: ArrangedMatrix,
    bias: torch.Tensor | None,
    tiles: RowTiles | None = None,
) -> torch.Tensor:
    """The product by our own kernel."""
    (num_rows, size_in), size_out = x.codes.shape, weight.size_out
    out = torch.empty(num_rows, size_out, dtype=x.dtype, device=x.codes.device)
    matrix = weight.codes.view(x.codes.dtype)
    copied = can_copy_tiles(out.device)
    tiles = tiles or _choose_tiles(num_rows, weight)
    grid = cdiv(num_rows, tiles.rows) * cdiv(size_out, tiles.outputs)
    block_k = BLOCK_K * tiles.runs
    assert size_in % block_k == 0
    parts = out
    if tiles.splits > 1:
        assert grid <= len(weight.arrivals)
        parts = out.new_empty(tiles.splits, num_rows, size_out, dtype=torch.float32)
    _rounded_kernel[(grid, tiles.splits)](
        x.codes, tiles_of(x.codes, tiles.rows, block_k) if copied else None,
        matrix, tiles_of(matrix, tiles.outputs, block_k) if copied else None,
        x.scales, weight.scales, out if bias is None else bias, out,
        parts, weight.arrivals, num_rows,
        N=size_out, K=size_in, BLOCKS=weight.group > 0, COLUMNS=weight.scales.shape[-1],
        SCALE_ROWS=weight.scale_rows, BIAS=bias is not None, BLOCK_T=tiles.rows,
        BLOCK_N=tiles.outputs, BLOCK_K=block_k, TOGETHER=TOGETHER, COPIED=copied,
        STAGES=tiles.stages, SPLIT=tiles.splits, num_warps=tiles.warps, **early(out.device),
    )  # fmt: skip
    return out


def _small_tiles(num_rows: int, size_out: int) -> int:
    return -(-num_rows // SMALL) * -(-size_out // SMALL)


def _choose_tiles(num_rows: int, weight: ArrangedMatrix) -> RowTiles:
    """Choose small tiles, two or three on each processor, or parts of K if there are too few.

    If there would be many more, tiles are large, because they read fewer bytes. With a scale for
    each 128 inputs, registers limit their size.
    """
    processors = num_multiprocessors(weight.device)
    tiles, steps = _small_tiles(num_rows, weight.size_out), weight.padded_in // BLOCK_K
    if tiles > 3 * processors:
        return RowTiles(SMALL, 2 * SMALL, 1, 3) if weight.group else RowTiles(128, 128, 1, 4, 8)
    most = MOST_SPLITS if tiles <= len(weight.arrivals) else 1
    splits = max(1, min(2 * processors // tiles, steps // LEAST_STEPS, most))
    if tiles * splits <= 2 * processors and not weight.group and steps % 2 == 0:
        return RowTiles(SMALL, SMALL, splits, 3, runs=2)
    return RowTiles(SMALL, SMALL, splits, 4)
