"""Multiply very few rows by `BlockPlanes` with integer dot products, fused as in `block_products`.

T rows, K inputs, N outputs. Rows are rounded to integers of 14 bits, with a scale for each run of
128 inputs (see `rounded_rows`); C++ kernels do this for 32 inputs. Codes and inputs are multiplied
exactly, four at a time; so are the scales of k-quants. What is left for floats is a number for each
run, or for each group of other types. A weight takes half as many instructions as with tensor
cores, for which it is converted.

Order of sums: exact within a run, or a group; runs one after the other within a part, four
neighbouring threads, then the parts.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.triton.common import (
    INTERPRETED,
    await_inputs,
    leave_parts,
    let_next_begin,
    num_multiprocessors,
    sum_parts,
)
from nanovllm.kernels.triton.linear.block_bytes import codes_by_step, load_codes, load_four
from nanovllm.kernels.triton.linear.block_planes import RUN, BlockPlanes
from nanovllm.kernels.triton.linear.block_values import float16_of
from nanovllm.kernels.triton.linear.rounded_rows import LOW_BITS, WORD_ROUNDING, WORDS, RowWords
from nanovllm.kernels.triton.linear.row_outputs import RowOperands, store_outputs

MOST_ROWS = 2
OUTPUTS, WARPS = 64, 4  # of a program: a thread has two outputs, and a quarter of the inputs
PROGRAMS = 8  # on a multiprocessor
LEAST_RUNS, MOST_SPLITS = 2, 16


@triton.jit
def _dot(codes, inputs, total):  # type: ignore[no-untyped-def]
    """`total` plus the products of four unsigned bytes and four signed ones."""
    if INTERPRETED:
        for i in tl.static_range(4):
            total += (codes >> 8 * i & 255) * (inputs << 24 - 8 * i >> 24)
        return total
    return tl.inline_asm_elementwise(
        "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, inputs, total], dtype=tl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _scaled(  # type: ignore[no-untyped-def]
    dots, sums, words, mins, AT: tl.constexpr, SCALES: tl.constexpr, SCALE_CENTER: tl.constexpr,
    MINS: tl.constexpr,
):  # fmt: skip
    """A group's products times its scale, and its inputs times its min: exact integers, or floats.

    Scale and min are at a place in their words.
    """
    if SCALES == "float16":
        scaled = float16_of(words >> 16 * AT) * dots.to(tl.float32)
        least = scaled * 0
        if MINS:
            least = float16_of(mins >> 16 * AT) * sums.to(tl.float32)
    elif SCALES == "nibbles":
        scaled = dots * (words >> 8 * AT & 15)
        least = sums * (words >> 8 * AT + 4 & 15)
    else:
        scaled = dots * ((words >> 8 * AT & 255) - SCALE_CENTER)
        least = scaled * 0
        if MINS:
            least = sums * (mins >> 8 * AT & 255)
    return scaled, least


@triton.jit
def _run_products(  # type: ignore[no-untyped-def]
    codes, words, scales, more_scales, mins, more_mins,
    CENTER: tl.constexpr, GROUPS: tl.constexpr, SCALES: tl.constexpr, SCALE_CENTER: tl.constexpr,
    MINS: tl.constexpr, LOW_BITS: tl.constexpr,
):  # fmt: skip
    """Sum over the groups of a run, without what the run's own scales multiply."""
    PLACES: tl.constexpr = 2 if SCALES == "float16" else 4  # of a word  # noqa: N806
    STEPS: tl.constexpr = 8 // GROUPS  # of a group  # noqa: N806
    zero = tl.zeros_like(codes[0])
    for g in tl.static_range(GROUPS):
        dots, inputs = _dot(codes[g * STEPS], words[2 * g * STEPS], zero), words[16 + g * STEPS]
        if STEPS == 2:
            dots = _dot(codes[2 * g + 1], words[4 * g + 2], dots)
            inputs += words[17 + 2 * g]
        dots = _dot(codes[g * STEPS], words[2 * g * STEPS + 1], dots << LOW_BITS)
        if STEPS == 2:
            dots = _dot(codes[2 * g + 1], words[4 * g + 3], dots)
        scaled, least = _scaled(
            dots - CENTER * inputs, inputs, scales if g < PLACES else more_scales,
            mins if g < PLACES else more_mins, g % PLACES, SCALES, SCALE_CENTER, MINS,
        )  # fmt: skip
        if g == 0:
            total, total_least = scaled, least
        else:
            total += scaled
            total_least += least
    return total, total_least


@triton.jit
def _load_run(  # type: ignore[no-untyped-def]
    low_ptr, high_ptr, scales_ptr, mins_ptr, supers_ptr, n, q, run,
    LOW: tl.constexpr, HIGH: tl.constexpr, GROUPS: tl.constexpr, SCALES: tl.constexpr,
    MINS: tl.constexpr, WEIGHT_N: tl.constexpr,
):  # fmt: skip
    """A lane's words for a run: codes, scales and mins, and the two numbers of k-quants."""
    at = run * WEIGHT_N + n
    COUNT: tl.constexpr = GROUPS // 2 if SCALES == "float16" else GROUPS // 4  # noqa: N806
    codes = load_codes(low_ptr, high_ptr, at, q, LOW, HIGH)
    scales = tl.load(scales_ptr + at * COUNT)
    mins, more_scales = scales, scales
    if COUNT == 2:
        more_scales = tl.load(scales_ptr + at * 2 + 1)
    more_mins = more_scales
    if MINS and SCALES != "nibbles":
        mins = tl.load(mins_ptr + at * COUNT)
        more_mins = mins
        if COUNT == 2:
            more_mins = tl.load(mins_ptr + at * 2 + 1)
    supers = scales
    if SCALES != "float16":
        supers = tl.load(supers_ptr + run // 2 * WEIGHT_N + n)
    return codes, scales, more_scales, mins, more_mins, supers


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    codes, weights, words, row_scale,
    CENTER: tl.constexpr, GROUPS: tl.constexpr, SCALES: tl.constexpr, SCALE_CENTER: tl.constexpr,
    MINS: tl.constexpr, LOW_BITS: tl.constexpr,
):  # fmt: skip
    """A lane's products of a run: its codes and what `_load_run` returned, and a row's words."""
    _, scales, more_scales, mins, more_mins, supers = weights
    total, least = _run_products(codes, words, scales, more_scales, mins, more_mins, CENTER, GROUPS,
                                 SCALES, SCALE_CENTER, MINS, LOW_BITS)  # fmt: skip
    number, smallest = total.to(tl.float32), least.to(tl.float32)
    if SCALES != "float16":
        number *= float16_of(supers)
        smallest *= float16_of(supers >> 16)
    return (number - smallest if MINS else number) * row_scale


@triton.jit
def _added(sums, numbers, row):  # type: ignore[no-untyped-def]
    """The sums [T, lanes], with numbers added to those of a row."""
    if sums.shape[0] == 1:
        return sums + numbers[None, :]
    here = tl.arange(0, sums.shape[0]) == row
    return sums + tl.where(here[:, None], numbers[None, :], 0.0)


@triton.jit(do_not_specialize=["num_rows"])
def _block_dots_kernel(  # type: ignore[no-untyped-def]
    words_ptr, row_scales_ptr, low_ptr, high_ptr, scales_ptr, mins_ptr, supers_ptr,
    squares_ptr, bias_ptr, residual_ptr, norm_ptr, out_ptr, product_ptr, out_squares_ptr, parts_ptr,
    arrivals_ptr, num_rows, eps,
    N: tl.constexpr, K: tl.constexpr, RUN: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, CENTER: tl.constexpr, NUMBERS: tl.constexpr,
    GROUPS: tl.constexpr, SCALES: tl.constexpr, SCALE_CENTER: tl.constexpr, MINS: tl.constexpr,
    WEIGHT_N: tl.constexpr, LOW_BITS: tl.constexpr, WORDS: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a part of K for one tile of outputs of all rows."""
    HALF: tl.constexpr = BLOCK_N if GATED else BLOCK_N // 2  # noqa: N806
    first_n = tl.program_id(0) * BLOCK_N
    lane = tl.arange(0, 4 * HALF)
    q, upper = lane % 4, tl.minimum(first_n + lane // 4, N - 1)
    lower = N + upper if GATED else tl.minimum(first_n + HALF + lane // 4, N - 1)
    t = tl.arange(0, BLOCK_T)
    RUNS: tl.constexpr = (K + RUN - 1) // RUN  # noqa: N806
    SHARE: tl.constexpr = (RUNS + SPLIT - 1) // SPLIT  # noqa: N806
    split = tl.program_id(1)
    await_inputs(EARLY)
    acc = tl.zeros([BLOCK_T, 4 * HALF], tl.float32)
    up = acc
    begin = split * SHARE
    end = tl.minimum(begin + SHARE, RUNS)
    # The next run's words are on their way while a run is computed.
    last = tl.maximum(end - 1, 0)
    next_first = _load_run(low_ptr, high_ptr, scales_ptr, mins_ptr, supers_ptr, upper, q,
                           tl.minimum(begin, last), LOW, HIGH, GROUPS, SCALES, MINS,
                           WEIGHT_N)  # fmt: skip
    next_second = _load_run(low_ptr, high_ptr, scales_ptr, mins_ptr, supers_ptr, lower, q,
                            tl.minimum(begin, last), LOW, HIGH, GROUPS, SCALES, MINS,
                            WEIGHT_N)  # fmt: skip
    for run in range(begin, end):
        first, second = next_first, next_second
        after = tl.minimum(run + 1, last)
        next_first = _load_run(low_ptr, high_ptr, scales_ptr, mins_ptr, supers_ptr, upper, q, after,
                               LOW, HIGH, GROUPS, SCALES, MINS, WEIGHT_N)  # fmt: skip
        next_second = _load_run(low_ptr, high_ptr, scales_ptr, mins_ptr, supers_ptr, lower, q,
                                after, LOW, HIGH, GROUPS, SCALES, MINS, WEIGHT_N)  # fmt: skip
        codes = codes_by_step(first[0], LOW, HIGH, NUMBERS)
        more_codes = codes_by_step(second[0], LOW, HIGH, NUMBERS)
        for row in tl.static_range(BLOCK_T):
            of_row = row * RUNS + run
            scale = tl.load(row_scales_ptr + of_row)
            at = (of_row * 4 + q) * WORDS
            words = load_four(words_ptr, at) + load_four(words_ptr, at + 4)
            words += load_four(words_ptr, at + 8) + load_four(words_ptr, at + 12)
            words += load_four(words_ptr, at + 16) + load_four(words_ptr, at + 20)
            numbers = _products(codes, first, words, scale, CENTER, GROUPS, SCALES, SCALE_CENTER,
                                MINS, LOW_BITS)  # fmt: skip
            acc = _added(acc, numbers, row)
            numbers = _products(more_codes, second, words, scale, CENTER, GROUPS, SCALES,
                                SCALE_CENTER, MINS, LOW_BITS)  # fmt: skip
            up = _added(up, numbers, row)
    acc = tl.sum(tl.reshape(acc, (BLOCK_T, HALF, 4)), axis=2)
    up = tl.sum(tl.reshape(up, (BLOCK_T, HALF, 4)), axis=2)
    if not GATED:
        acc = tl.reshape(tl.permute(tl.join(acc, up), (0, 2, 1)), (BLOCK_T, BLOCK_N))
        up = acc
    n = first_n + tl.arange(0, BLOCK_N)
    real = (t < num_rows)[:, None] & (n < N)[None, :]
    at = t[:, None] * N + n[None, :]
    size = num_rows * N
    tile = tl.program_id(0)
    finishes = leave_parts(acc, up, parts_ptr, arrivals_ptr, tile, split, size, at, real, SPLIT,
                           GATED)  # fmt: skip
    let_next_begin(EARLY)
    if finishes:
        inside_n = tl.minimum(n, N - 1)
        squares, residual, norm = acc, acc, acc
        if P:
            p = tl.arange(0, BLOCK_P)
            counted = (t < num_rows)[:, None] & (p < P)[None, :]
            squares = tl.load(squares_ptr + t[:, None] * P + p[None, :], mask=counted, other=0.0)
        if ADD:
            residual = tl.load(residual_ptr + at, mask=real, other=0.0)
            norm = tl.load(norm_ptr + inside_n)
        acc, up = sum_parts(acc, up, parts_ptr, arrivals_ptr, tile, size, at, real, SPLIT, GATED,
                            True)  # fmt: skip
        store_outputs(acc, up, squares, bias_ptr, residual, norm, out_ptr, product_ptr,
                      out_squares_ptr, t, inside_n, tile, at, real, num_rows, eps, N, K, P, BIAS,
                      GATED, ADD, BLOCK_N)  # fmt: skip


def can_dot(num_rows: int, weight: BlockPlanes) -> bool:
    """Whether the kernel takes this many rows, which must have 16 bits, and the weight's type.

    MXFP4 has no integers, and scales in bfloat16. A thread's sums of a run fit 32 bits for the
    other types: those of Q6_K and IQ4_XS are at most half as large.
    """
    return num_rows <= MOST_ROWS and weight.parts.scale_type != "bfloat16"


def launch(rows: RowOperands, weight: BlockPlanes, words: RowWords | None = None) -> torch.Tensor:
    """Launch the kernel for rows x, or for their `words`; then x is not read.

    Returns the sums of squares, if there are addends.
    """
    (num_rows, size_out), device = rows.out.shape, rows.out.device
    words = words or WORD_ROUNDING.rows(rows.x)
    outputs = OUTPUTS // (1 + rows.gated)
    columns, block_t = cdiv(size_out, outputs), len(words.words)
    most = min(MOST_SPLITS, weight.runs // LEAST_RUNS)
    splits = max(1, min(most, PROGRAMS * num_multiprocessors(device) // columns))
    tensors, constants = rows.arguments(columns)
    parts = squares = tensors[-1]
    if splits > 1:
        shape = splits, 1 + rows.gated, num_rows, size_out
        parts = torch.empty(shape, dtype=torch.float32, device=device)
    constants |= {"K": weight.shape[1], **weight.constants}
    _block_dots_kernel[(columns, splits)](
        words.words, words.scales, *weight.tensors, *tensors, parts, weight.arrivals, num_rows,
        rows.eps, RUN=RUN, LOW_BITS=LOW_BITS, WORDS=WORDS, SPLIT=splits, BLOCK_T=block_t,
        BLOCK_N=outputs, num_warps=WARPS, num_stages=1, **constants,
    )  # fmt: skip
    return squares
