"""Divide a product of a quantized weight and rows that are not rounded among programs.

T rows, K inputs, N outputs. On Hopper GPUs a group of four warps multiplies 64 outputs (`wgmma`),
with the weights in registers and the rows in shared memory.
"""

import functools
from dataclasses import dataclass

import torch

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.triton.common import can_copy_tiles, num_multiprocessors, shared_bytes
from nanovllm.kernels.triton.linear.arranged import ArrangedMatrix

FEW = 64  # the most rows for `few_rows`, if they are not rounded
FEW_ROUNDED = 32  # up to this many rows are not rounded even if the weight allows it
# The most rows for the kernel on Hopper GPUs, and the least size of the weight. For more rows or
# smaller weights, it is faster to dequantize the weight first.
MOST_ROWS, LARGE = 256, 1 << 24
OUTPUTS = 64  # outputs of four warps
LEAST_STEPS = 2  # the fewest steps of a program that shares K with others
MOST_STAGES = 4


@dataclass(frozen=True, slots=True)
class RowTiles:
    """How a product is divided."""

    rows: int
    outputs: int
    splits: int  # programs that share a tile of outputs, each with a part of the inputs
    stages: int  # tiles of inputs in flight
    warps: int = 4
    copies_x: bool = False  # the tensor memory accelerator copies x, as it does codes
    runs: int = 1  # runs of `inner` inputs in a tile; an even number for codes of 4 bits
    scales_each: bool = False  # scale each product of `inner` inputs, for any number of rows
    parts: int = 1  # of the inputs, which a program that shares no tile adds up one by one


def most_rows(weight: ArrangedMatrix, dtype: torch.dtype) -> int:
    """The most rows that the kernel multiplies faster than PyTorch with a dequantized weight."""
    large = weight.size_out * weight.size_in >= LARGE
    return MOST_ROWS if large and _has_wgmma(weight, dtype) else FEW


def choose_tiles(
    num_rows: int, weight: ArrangedMatrix, gated: bool, dtype: torch.dtype
) -> RowTiles:
    """Choose the tiles of a product by its shape."""
    runs = 2 if weight.kind == "int4" else 1
    choose = _wgmma_tiles if _has_wgmma(weight, dtype) else _other_tiles
    return choose(
        num_rows, weight.padded_in // (weight.inner * runs), weight.size_out // (1 + gated),
        weight.inner, runs, gated, dtype.itemsize, num_multiprocessors(weight.device),
        shared_bytes(weight.device),
    )  # fmt: skip


def _has_wgmma(weight: ArrangedMatrix, dtype: torch.dtype) -> bool:
    return dtype.itemsize == 2 and can_copy_tiles(weight.device)


@functools.cache
def _wgmma_tiles(
    num_rows: int, steps: int, size_out: int, inner: int, runs: int, gated: bool, itemsize: int,
    processors: int, room: int,
) -> RowTiles:  # fmt: skip
    """Choose tiles so that a processor runs a few at the same time.

    If there are too few tiles, K is divided into parts. The sums of parts are written and read once
    more, so there are fewer parts with more rows.
    """
    rows = next(size for size in (16, 32, 64, 128) if num_rows <= size or size == 128)
    programs = cdiv(num_rows, rows) * cdiv(size_out, OUTPUTS)
    splits, most_splits = 1, 8 if rows == 16 else 4
    while splits < most_splits and programs * splits < 5 * processors // 2:
        if steps < 2 * splits * LEAST_STEPS:
            break
        splits *= 2
    side_by_side = 4 if rows == 16 else 3 if rows < 128 else 1
    # Codes are freed in shared memory when they are converted, rows when they have been multiplied.
    codes, x = OUTPUTS * (1 + gated) * inner, rows * itemsize * runs * inner
    stages = max(2, min(MOST_STAGES, (room // side_by_side + codes) // (codes + x)))
    stages = min(stages, 3) if rows >= 64 else stages
    return RowTiles(rows, OUTPUTS, splits, stages, 4, rows >= 32, runs)


@functools.cache
def _other_tiles(
    num_rows: int, steps: int, size_out: int, inner: int, runs: int, gated: bool, itemsize: int,
    processors: int, room: int,
) -> RowTiles:  # fmt: skip
    """Choose tiles so that about three run on each processor. Not measured."""
    rows = next(size for size in (8, 16, 32) if num_rows <= size or size == 32)
    outputs = 32 if gated else 64
    programs = cdiv(num_rows, rows) * cdiv(size_out, outputs)
    splits, most_splits = 1, 8 if rows == 8 else 4
    while splits < most_splits and programs * splits < 3 * processors and steps >= 4 * splits:
        splits *= 2
    stage = (rows * itemsize * runs + outputs * (1 + gated)) * inner
    stages = max(2, min(MOST_STAGES, room // 3 // stage))
    return RowTiles(rows, outputs, splits, stages, 4 if rows == 32 else 2, False, runs)
