"""Linear layers of few rows with quantized weights, in one kernel with what is around them.

T rows, K inputs, N outputs. It is `few_rows` for an `ArrangedMatrix`: reading the codes bounds it.
The codes of a tile become numbers in registers; a scale multiplies a tile's product, never the
weights. Rows are not rounded. Where there are too few tiles to keep the memory busy, several
programs share one, each with a part of K, and the last to finish adds up the parts in their order.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.kernels.plain.few_rows import Scaled
from nanovllm.kernels.triton.arranged import LEAST_OUTPUTS, MOST_ROW_TILES, ArrangedMatrix
from nanovllm.kernels.triton.common import (
    await_inputs,
    can_copy_tiles,
    dot,
    early,
    let_next_begin,
    num_multiprocessors,
    shared_bytes,
    tiles_of,
)
from nanovllm.kernels.triton.unpack import unpack

MOST_ROWS = 64  # of the kernel; with more, dequantized weights are faster


@triton.jit
def add_product(  # type: ignore[no-untyped-def]
    acc, x, codes, scales_ptr, zeros_ptr, n, k, TURNED: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, SCALE_ROWS: tl.constexpr,
    KIND: tl.constexpr, HALF: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """acc plus x [T, inner] times the weights of outputs n from input k on, scaled by group.

    TURNED: acc is [outputs, T]. The tensor cores' left matrix has 16 rows, and their right one 8
    columns, so that suits few rows.
    """
    at = n // SCALE_ROWS
    if GROUP:  # padding has no group of its own
        at += tl.minimum(k // GROUP, GROUPS - 1) * COLUMNS
    if GROUP:
        scales = tl.load(scales_ptr + at)
    weight = unpack(codes, KIND, HALF, x.dtype)
    if ZEROS:
        weight -= tl.load(zeros_ptr + at).to(weight.dtype)[:, None]  # exact
    product = dot(weight, tl.trans(x)) if TURNED else dot(x, tl.trans(weight))
    if GROUP:
        scales = scales.to(tl.float32)
        product *= scales[:, None] if TURNED else scales[None, :]
    return acc + product


@triton.jit
def _load_x(  # type: ignore[no-untyped-def]
    x_ptr, x_tiles, first_t, k, num_rows,
    K: tl.constexpr, PADDED: tl.constexpr, BLOCK_T: tl.constexpr, INNER: tl.constexpr,
    COPIED: tl.constexpr,
):  # fmt: skip
    """INNER inputs of BLOCK_T rows; zeros after the ends."""
    if COPIED:
        return x_tiles.load([first_t, k])
    t = first_t + tl.arange(0, BLOCK_T)
    at = k + tl.arange(0, INNER)
    inside = (t < num_rows)[:, None]
    if PADDED != K:
        inside &= (at < K)[None, :]
    return tl.load(x_ptr + t[:, None] * K + at[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def _quantized_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, x_tiles, codes_ptr, codes_tiles, scales_ptr, zeros_ptr, squares_ptr, bias_ptr,
    residual_ptr, norm_ptr, out_ptr, product_ptr, out_squares_ptr, parts_ptr, arrivals_ptr,
    num_rows, eps,
    N: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, SCALE_ROWS: tl.constexpr, KIND: tl.constexpr,
    ZEROS: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, INNER: tl.constexpr, COPIED: tl.constexpr,
    COPIED_X: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A part of K of one tile of outputs. Neighbouring programs share its codes."""
    first_t = tl.program_id(0) * BLOCK_T
    first_n = tl.program_id(1) * BLOCK_N
    t = first_t + tl.arange(0, BLOCK_T)
    n = first_n + tl.arange(0, BLOCK_N)
    real = (t < num_rows)[:, None] & (n < N)[None, :]
    at = t[:, None] * N + n[None, :]
    inside_n = tl.minimum(n, N - 1) if N % BLOCK_N else n
    FOUR: tl.constexpr = KIND == "int4"  # noqa: N806
    STEP: tl.constexpr = INNER * (1 + FOUR)  # noqa: N806
    ROW_BYTES: tl.constexpr = PADDED // (1 + FOUR)  # noqa: N806
    SHARE: tl.constexpr = (PADDED // STEP + SPLIT - 1) // SPLIT * STEP  # noqa: N806
    await_inputs(EARLY)
    # Loads for the end of the kernel start before those of the codes, which take longest.
    if P:
        p = tl.arange(0, BLOCK_P)
        counted = (t < num_rows)[:, None] & (p < P)[None, :]
        squares = tl.load(squares_ptr + t[:, None] * P + p[None, :], mask=counted, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + at, mask=real, other=0.0)
        norm = tl.load(norm_ptr + inside_n)
    if not GROUP:
        scales = tl.load(scales_ptr + inside_n)
        if GATED:
            up_scales = tl.load(scales_ptr + N + inside_n)
    TURNED: tl.constexpr = BLOCK_T < 64  # noqa: N806
    acc = tl.zeros([BLOCK_N, BLOCK_T] if TURNED else [BLOCK_T, BLOCK_N], tl.float32)
    up = acc
    split = tl.program_id(2)
    b = tl.arange(0, INNER)
    for k in range(split * SHARE, tl.minimum((split + 1) * SHARE, PADDED), STEP):
        byte = k // 2 if FOUR else k
        if COPIED:
            codes = codes_tiles.load([first_n, byte])
            if GATED:
                up_codes = codes_tiles.load([N + first_n, byte])
        else:
            codes_at = codes_ptr + inside_n.to(tl.int64)[:, None] * ROW_BYTES + (byte + b)[None, :]
            codes = tl.load(codes_at)
            if GATED:
                up_codes = tl.load(codes_at + N * ROW_BYTES)
        for half in tl.static_range(1 + FOUR):
            at_k = k + half * INNER
            x = _load_x(
                x_ptr, x_tiles, first_t, at_k, num_rows, K, PADDED, BLOCK_T, INNER, COPIED_X
            )
            acc = add_product(
                acc, x, codes, scales_ptr, zeros_ptr, inside_n, at_k,
                TURNED, GROUPS, GROUP, COLUMNS, SCALE_ROWS, KIND, half, ZEROS,
            )  # fmt: skip
            if GATED:
                up = add_product(
                    up, x, up_codes, scales_ptr, zeros_ptr, N + inside_n, at_k,
                    TURNED, GROUPS, GROUP, COLUMNS, SCALE_ROWS, KIND, half, ZEROS,
                )  # fmt: skip
    if TURNED:
        acc = tl.trans(acc)
        up = tl.trans(up)
    if SPLIT > 1:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        size = num_rows * N
        parts_at = parts_ptr + split * (1 + GATED) * size + at
        tl.store(parts_at, acc, mask=real)
        if GATED:
            tl.store(parts_at + size, up, mask=real)
        # The barrier puts all threads' writes before the release; the acquire the reads after it.
        tl.debug_barrier()
        finishes = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
    else:
        finishes = True
    let_next_begin(EARLY)
    if finishes:
        if SPLIT > 1:
            tl.store(arrivals_ptr + tile, 0)  # for the next call
            acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
            up = acc
            for part in tl.static_range(SPLIT):
                parts_at = parts_ptr + part * (1 + GATED) * size + at
                acc += tl.load(parts_at, mask=real, other=0.0, cache_modifier=".cg")
                if GATED:
                    up += tl.load(parts_at + size, mask=real, other=0.0, cache_modifier=".cg")
        if not GROUP:
            acc *= scales.to(tl.float32)[None, :]
            if GATED:
                up *= up_scales.to(tl.float32)[None, :]
        if P:
            factor = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[:, None]
            acc *= factor
            up *= factor
        if BIAS:
            acc += tl.load(bias_ptr + inside_n).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(bias_ptr + N + inside_n).to(tl.float32)[None, :]
        if GATED:
            acc = acc / (1.0 + tl.exp(-acc)) * up
        if ADD:
            acc += residual.to(tl.float32)
        rounded = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, rounded, mask=real)
        if ADD:
            wide = tl.where(real, rounded.to(tl.float32), 0.0)
            product = wide * norm.to(tl.float32)[None, :]
            tl.store(product_ptr + at, product.to(product_ptr.dtype.element_ty), mask=real)
            square_at = out_squares_ptr + t * tl.num_programs(1) + tl.program_id(1)
            tl.store(square_at, tl.sum(wide * wide, axis=1), mask=t < num_rows)


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is divided."""

    rows: int
    outputs: int
    splits: int  # programs that share a tile of outputs, each with a part of the inputs
    stages: int  # tiles of inputs in flight
    warps: int = 4
    copies_x: bool = False  # by the tensor memory accelerator, as it does codes


def launch(
    x: torch.Tensor,
    weight: ArrangedMatrix,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scaled: Scaled | None = None,
    gated: bool = False,
    addends: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Launch the kernel on x [T, K]. Returns the sums of squares, if there are addends."""
    (num_rows, size_in), size_out = x.shape, out.shape[1]
    assert x.is_contiguous() and out.is_contiguous() and weight.has_rows_kernel
    tiles = tiles or choose_tiles(num_rows, weight, gated, x.dtype)
    columns = triton.cdiv(size_out, tiles.outputs)
    assert triton.cdiv(num_rows, tiles.rows) <= MOST_ROW_TILES and tiles.outputs >= LEAST_OUTPUTS
    squares = x.new_empty(num_rows, columns if addends else 0, dtype=torch.float32)
    residual, norm, product = addends or (x, x, x)
    squares_in, eps = (squares, 0.0) if scaled is None else (scaled.squares, scaled.eps)
    width = 0 if scaled is None else squares_in.shape[1]
    parts = squares
    if tiles.splits > 1:
        parts = x.new_empty(tiles.splits, 1 + gated, num_rows, size_out, dtype=torch.float32)
    copied = can_copy_tiles(x.device)
    # Rows of a matrix that begin at multiples of 16 bytes.
    copied_x = copied and tiles.copies_x and size_in * x.itemsize % 16 == 0
    _quantized_rows_kernel[(triton.cdiv(num_rows, tiles.rows), columns, tiles.splits)](
        x, tiles_of(x, tiles.rows, weight.inner) if copied_x else None,
        weight.codes, tiles_of(weight.codes, tiles.outputs, weight.inner) if copied else None,
        weight.scales, weight.scales if weight.zeros is None else weight.zeros,
        squares_in, x if bias is None else bias, residual, norm, out, product, squares, parts,
        weight.arrivals, num_rows, eps,
        N=size_out, K=size_in, PADDED=weight.padded_in, GROUPS=weight.scales.shape[-2],
        GROUP=weight.group, COLUMNS=weight.scales.shape[-1], SCALE_ROWS=weight.scale_rows,
        KIND=weight.kind, ZEROS=weight.zeros is not None,
        P=width, BLOCK_P=triton.next_power_of_2(max(1, width)), BIAS=bias is not None,
        GATED=gated, ADD=addends is not None, SPLIT=tiles.splits,
        BLOCK_T=tiles.rows, BLOCK_N=tiles.outputs, INNER=weight.inner, COPIED=copied,
        COPIED_X=copied_x, num_warps=tiles.warps, num_stages=tiles.stages, **early(x.device),
    )  # fmt: skip
    return squares


def choose_tiles(num_rows: int, weight: ArrangedMatrix, gated: bool, dtype: torch.dtype) -> Tiles:
    """The tiles for a product, from its shape alone."""
    return _tiles(
        num_rows, weight.padded_in, weight.size_out // (1 + gated), weight.inner,
        weight.kind == "int4", gated, dtype.itemsize, num_multiprocessors(weight.device),
        shared_bytes(weight.device), dtype.itemsize == 2 and can_copy_tiles(weight.device),
    )  # fmt: skip


@functools.cache
def _tiles(
    num_rows: int, padded_in: int, size_out: int, inner: int, four_bits: bool, gated: bool,
    itemsize: int, processors: int, room: int, wide: bool,
) -> Tiles:  # fmt: skip
    """Tiles of which about two programs run on each processor, with the fewest instructions.

    Not measured yet.
    """
    four_warps = num_rows > 32 and wide
    rows = (
        64 if four_warps else next(size for size in (8, 16, 32) if num_rows <= size or size == 32)
    )
    outputs = 64 if not gated or four_warps else 32
    programs = triton.cdiv(num_rows, rows) * triton.cdiv(size_out, outputs)
    steps = padded_in // (inner * (1 + four_bits))
    splits, most = 1, 8 if rows == 8 else 4
    while splits < most and programs * splits < 3 * processors and steps >= 4 * splits:
        splits *= 2
    room //= 3
    # Weights go through shared memory too, where four warps multiply them.
    room -= outputs * inner * itemsize if four_warps else 0
    tile_bytes = rows * inner * itemsize * (1 + four_bits) + outputs * inner * (1 + gated)
    stages = max(2, min(4, room // tile_bytes))
    return Tiles(rows, outputs, splits, stages, 4 if four_warps else 2)
