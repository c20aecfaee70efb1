"""Linear layers for few rows with quantized weights, fused with the operations around them.

T rows, K inputs, N outputs. This is `few_rows` for an `ArrangedMatrix`: it takes the time of
reading the codes. The codes of a tile are converted in registers; a scale multiplies a tile's
product, never the weights. Rows are not rounded. If there are too few tiles to keep the memory
busy, several programs share a tile, each with a part of K, and the last one to finish adds up the
parts in their order.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.triton.common import (
    await_inputs,
    can_copy_tiles,
    dot,
    leave_parts,
    let_next_begin,
    sum_parts,
    tiles_of,
    with_room,
)
from nanovllm.kernels.triton.linear.arranged import (
    LEAST_OUTPUTS,
    MOST_ROW_TILES,
    WORD,
    ArrangedMatrix,
)
from nanovllm.kernels.triton.linear.row_outputs import RowOperands, store_outputs
from nanovllm.kernels.triton.linear.row_tiles import RowTiles, choose_tiles
from nanovllm.kernels.triton.linear.unpack import unpack


@triton.jit
def _of_outputs(  # type: ignore[no-untyped-def]
    ptr, tiles, first_n, k, N: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    COLUMNS: tl.constexpr, SCALE_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    if COPIED:
        return tl.reshape(tiles.load([k // GROUP, first_n]), (BLOCK_N,))
    at = tl.minimum(first_n + tl.arange(0, BLOCK_N), N - 1) // SCALE_ROWS
    if GROUP:  # the padding has no group
        at += tl.minimum(k // GROUP, GROUPS - 1) * COLUMNS
    return tl.load(ptr + at)


@triton.jit
def load_scales(  # type: ignore[no-untyped-def]
    scales_ptr, scales_tiles, zeros_ptr, zeros_tiles, first_n, k,
    N: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
    SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr, BLOCK_N: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """The scales and the zero points, if there are any, of BLOCK_N of N outputs and input k."""
    scales = _of_outputs(scales_ptr, scales_tiles, first_n, k,
                         N, GROUPS, GROUP, COLUMNS, SCALE_ROWS, BLOCK_N, COPIED)  # fmt: skip
    zeros = scales
    if ZEROS:
        zeros = _of_outputs(zeros_ptr, zeros_tiles, first_n, k,
                            N, GROUPS, GROUP, COLUMNS, SCALE_ROWS, BLOCK_N, COPIED)  # fmt: skip
    return scales, zeros


@triton.jit
def add_product(  # type: ignore[no-untyped-def]
    acc, x, words, scales, zeros,
    SCALED: tl.constexpr, KIND: tl.constexpr, HALF: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """acc [outputs, T] plus the weights of `words` times x [T, inner], and times scales if SCALED.

    The weights are the left matrix, which tensor cores read from registers. The right matrix is x,
    which may have only 8 rows.
    """
    weight = unpack(words, zeros, x, KIND, HALF, ZEROS)
    product = dot(weight, tl.trans(x))
    if SCALED:
        product *= scales.to(tl.float32)[:, None]
    return acc + product


@triton.jit
def _load_x(  # type: ignore[no-untyped-def]
    x_ptr, x_tiles, first_t, k, num_rows,
    K: tl.constexpr, PADDED: tl.constexpr, BLOCK_T: tl.constexpr, INNER: tl.constexpr,
    COPIED: tl.constexpr,
):  # fmt: skip
    """Load INNER inputs of BLOCK_T rows, with zeros after the ends."""
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
    x_ptr, x_tiles, words_ptr, words_tiles, scales_ptr, scales_tiles, zeros_ptr, zeros_tiles,
    squares_ptr, bias_ptr, residual_ptr, norm_ptr, out_ptr, product_ptr, out_squares_ptr, parts_ptr,
    arrivals_ptr, num_rows, eps,
    N: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, SCALE_ROWS: tl.constexpr, KIND: tl.constexpr,
    ZEROS: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, INNER: tl.constexpr, RUNS: tl.constexpr,
    COPIED: tl.constexpr, COPIED_X: tl.constexpr, COPIED_SCALES: tl.constexpr,
    STAGES: tl.constexpr, SCALES_EACH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a part of K for one tile of outputs. Neighbouring programs use the same codes."""
    first_t = tl.program_id(0) * BLOCK_T
    first_n = tl.program_id(1) * BLOCK_N
    t = first_t + tl.arange(0, BLOCK_T)
    n = first_n + tl.arange(0, BLOCK_N)
    real = (t < num_rows)[:, None] & (n < N)[None, :]
    at = t[:, None] * N + n[None, :]
    inside_n = tl.minimum(n, N - 1) if N % BLOCK_N else n
    FOUR: tl.constexpr = KIND == "int4"  # noqa: N806
    OUTPUTS: tl.constexpr = N * 2 if GATED else N  # noqa: N806
    STEP: tl.constexpr = INNER * RUNS  # noqa: N806
    SHARE: tl.constexpr = (PADDED // STEP + SPLIT - 1) // SPLIT * STEP  # noqa: N806
    WORDS: tl.constexpr = INNER // 4  # noqa: N806
    ROW_WORDS: tl.constexpr = PADDED // (4 * (1 + FOUR))  # noqa: N806
    # If each product is scaled separately, tensor cores do not wait for an accumulator.
    EACH: tl.constexpr = GROUP > 0 or BLOCK_T <= 64 or SCALES_EACH  # noqa: N806
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
        scales, zeros = load_scales(
            scales_ptr, scales_tiles, zeros_ptr, zeros_tiles, first_n, 0, OUTPUTS, GROUPS, GROUP,
            COLUMNS, SCALE_ROWS, ZEROS, BLOCK_N, COPIED_SCALES,
        )  # fmt: skip
        if GATED:
            up_scales, up_zeros = load_scales(
                scales_ptr, scales_tiles, zeros_ptr, zeros_tiles, N + first_n, 0, OUTPUTS, GROUPS,
                GROUP, COLUMNS, SCALE_ROWS, ZEROS, BLOCK_N, COPIED_SCALES,
            )  # fmt: skip
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = acc
    split = tl.program_id(2)
    end = tl.minimum((split + 1) * SHARE, PADDED)
    for first_k in tl.range(split * SHARE, end, STEP, num_stages=STAGES):
        for run in tl.static_range(RUNS // (1 + FOUR)):
            word = first_k // (4 * (1 + FOUR)) + run * WORDS
            if COPIED:
                words = words_tiles.load([first_n, word])
                if GATED:
                    up_words = words_tiles.load([N + first_n, word])
            else:
                w = word + tl.arange(0, WORDS)
                words_at = words_ptr + inside_n.to(tl.int64)[:, None] * ROW_WORDS + w[None, :]
                words = tl.load(words_at)
                if GATED:
                    up_words = tl.load(words_at + N * ROW_WORDS)
            for half in tl.static_range(1 + FOUR):
                k = first_k + (run * (1 + FOUR) + half) * INNER
                x = _load_x(
                    x_ptr, x_tiles, first_t, k, num_rows, K, PADDED, BLOCK_T, INNER, COPIED_X
                )
                if GROUP:
                    scales, zeros = load_scales(
                        scales_ptr, scales_tiles, zeros_ptr, zeros_tiles, first_n, k, OUTPUTS,
                        GROUPS, GROUP, COLUMNS, SCALE_ROWS, ZEROS, BLOCK_N, COPIED_SCALES,
                    )  # fmt: skip
                acc = add_product(acc, x, words, scales, zeros, EACH, KIND, half, ZEROS)
                if GATED:
                    if GROUP:
                        up_scales, up_zeros = load_scales(
                            scales_ptr, scales_tiles, zeros_ptr, zeros_tiles, N + first_n, k,
                            OUTPUTS, GROUPS, GROUP, COLUMNS, SCALE_ROWS, ZEROS, BLOCK_N,
                            COPIED_SCALES,
                        )  # fmt: skip
                    up = add_product(up, x, up_words, up_scales, up_zeros, EACH, KIND, half, ZEROS)
    acc = tl.trans(acc)
    up = tl.trans(up)
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    size = num_rows * N
    finishes = leave_parts(acc, up, parts_ptr, arrivals_ptr, tile, split, size, at, real,
                           SPLIT, GATED)  # fmt: skip
    let_next_begin(EARLY)
    if finishes:
        acc, up = sum_parts(acc, up, parts_ptr, arrivals_ptr, tile, size, at, real, SPLIT, GATED,
                            BLOCK_T <= 64)  # fmt: skip
        if not EACH:
            acc *= scales.to(tl.float32)[None, :]
            if GATED:
                up *= up_scales.to(tl.float32)[None, :]
        store_outputs(acc, up, squares if P else acc, bias_ptr, residual if ADD else acc,
                      norm if ADD else acc, out_ptr, product_ptr, out_squares_ptr, t, inside_n,
                      tl.program_id(1), at, real, num_rows, eps, N, K, P, BIAS, GATED, ADD,
                      BLOCK_N)  # fmt: skip


def launch(
    rows: RowOperands, weight: ArrangedMatrix, tiles: RowTiles | None = None
) -> torch.Tensor:
    """Launch the kernel. Returns the sums of squares, if there are addends."""
    x, (num_rows, size_out), size_in = rows.x, rows.out.shape, rows.x.shape[1]
    assert x.is_contiguous() and rows.out.is_contiguous() and weight.has_rows_kernel
    tiles = tiles or choose_tiles(num_rows, weight, rows.gated, x.dtype)
    columns = cdiv(size_out, tiles.outputs)
    assert weight.padded_in % (weight.inner * tiles.runs) == 0
    assert cdiv(num_rows, tiles.rows) <= MOST_ROW_TILES and tiles.outputs >= LEAST_OUTPUTS
    tensors, constants = rows.arguments(columns)
    parts = squares = tensors[-1]
    if tiles.splits > 1:
        parts = x.new_empty(tiles.splits, 1 + rows.gated, num_rows, size_out, dtype=torch.float32)
    copied = can_copy_tiles(x.device)
    # Rows can be copied if they begin at multiples of 16 bytes.
    copied_x = copied and tiles.copies_x and size_in * x.itemsize % 16 == 0
    whole_x = with_room(x, tiles.rows)
    copied_x &= len(whole_x) % tiles.rows == 0  # partial tiles are slow to copy
    zeros = weight.scales if weight.zeros is None else weight.zeros
    # Threads load tiles of scales that have few bytes, and those of blocks.
    copied_scales = copied and weight.group > 0 and weight.scale_rows == 1
    copied_scales &= size_out % 16 == 0
    _quantized_rows_kernel[(cdiv(num_rows, tiles.rows), columns, tiles.splits)](
        x, tiles_of(whole_x, tiles.rows, weight.inner) if copied_x else None,
        weight.words,
        tiles_of(weight.words, tiles.outputs, weight.inner // WORD) if copied else None,
        weight.scales, tiles_of(weight.scales, 1, tiles.outputs) if copied_scales else None,
        zeros, tiles_of(zeros, 1, tiles.outputs) if copied_scales else None,
        *tensors, parts, weight.arrivals, num_rows, rows.eps,
        PADDED=weight.padded_in, SPLIT=tiles.splits,
        BLOCK_T=tiles.rows, BLOCK_N=tiles.outputs, RUNS=tiles.runs,
        COPIED=copied, COPIED_X=copied_x, COPIED_SCALES=copied_scales,
        num_warps=tiles.warps, STAGES=tiles.stages, SCALES_EACH=tiles.scales_each,
        **weight.constants,
        **constants,
    )  # fmt: skip
    return squares
