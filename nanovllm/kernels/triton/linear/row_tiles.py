"""How a product of a quantized weight and rows that are not rounded is divided among programs.

T rows, K inputs, N outputs. On Hopper GPUs a group of four warps multiplies 64 outputs (`wgmma`),
with the weights in registers and the rows in shared memory.
"""

import functools
from dataclasses import dataclass

import torch

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.triton.common import can_copy_tiles, num_multiprocessors, shared_bytes
from nanovllm.kernels.triton.linear.arranged import ArrangedMatrix

FEW = 64  # rows that `few_rows` takes, if they are not rounded
FEW_ROUNDED = 32  # rows that are not rounded although the weight allows it
# Rows of the kernel on Hopper GPUs for weights of that size. More, or smaller weights, are faster
# if the weight is dequantized first.
MOST_ROWS, LARGE = 256, 1 << 24
OUTPUTS = 64  # of four warps
LEAST_STEPS = 2  # of a program, if others have the rest of K
MOST_STAGES = 4


@dataclass(frozen=True, slots=True)
class RowTiles:
    """How a product is divided."""

    rows: int
    outputs: int
    splits: int  # programs that share a tile of outputs, each with a part of the inputs
    stages: int  # tiles of inputs in flight
    warps: int = 4
    copies_x: bool = False  # by the tensor memory accelerator, as it does codes
    runs: int = 1  # times `inner` inputs in a tile; codes of 4 bits have an even number


def most_rows(weight: ArrangedMatrix, dtype: torch.dtype) -> int:
    """The rows that the kernel multiplies faster than PyTorch does with a dequantized weight."""
    large = weight.size_out * weight.size_in >= LARGE
    return MOST_ROWS if large and _has_wgmma(weight, dtype) else FEW


def choose_tiles(
    num_rows: int, weight: ArrangedMatrix, gated: bool, dtype: torch.dtype
) -> RowTiles:
    """The tiles for a product, from its shape alone."""
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
    """Tiles of which a processor holds a few at the same time.

    Parts of K are for tiles that are too few; their sums are read and written once more, so there
    are fewer of them with more rows.
    """
    rows = next(size for size in (16, 32, 64, 128) if num_rows <= size or size == 128)
    programs = cdiv(num_rows, rows) * cdiv(size_out, OUTPUTS)
    splits, most_splits = 1, 8 if rows == 16 else 4
    while splits < most_splits and programs * splits < 5 * processors // 2:
        if steps < 2 * splits * LEAST_STEPS:
            break
        splits *= 2
    side_by_side = 4 if rows == 16 else 3 if rows < 128 else 1
    # Codes leave shared memory when they become numbers, the rows when they were multiplied.
    codes, x = OUTPUTS * (1 + gated) * inner, rows * itemsize * runs * inner
    stages = max(2, min(MOST_STAGES, (room // side_by_side + codes) // (codes + x)))
    stages = min(stages, 3) if rows >= 64 else stages
    return RowTiles(rows, OUTPUTS, splits, stages, 4, rows >= 32, runs)


@functools.cache
def _other_tiles(
    num_rows: int, steps: int, size_out: int, inner: int, runs: int, gated: bool, itemsize: int,
    processors: int, room: int,
) -> RowTiles:  # fmt: skip
    """Tiles of which about three run on each processor. Not measured."""
    rows = next(size for size in (8, 16, 32) if num_rows <= size or size == 32)
    outputs = 32 if gated else 64
    programs = cdiv(num_rows, rows) * cdiv(size_out, outputs)
    splits, most_splits = 1, 8 if rows == 8 else 4
    while splits < most_splits and programs * splits < 3 * processors and steps >= 4 * splits:
        splits *= 2
    stage = (rows * itemsize * runs + outputs * (1 + gated)) * inner
    stages = max(2, min(MOST_STAGES, room // 3 // stage))
    return RowTiles(rows, outputs, splits, stages, 4 if rows == 32 else 2, False, runs)
