"""How a product of a quantized weight and rows that are not rounded is divided among programs.

T rows, K inputs, N outputs. On Hopper GPUs a group of four warps multiplies 64 outputs (`wgmma`),
with the weights in registers and the rows in shared memory.
"""

import functools
from dataclasses import dataclass

import torch
import triton

from nanovllm.kernels.triton.arranged import ArrangedMatrix
from nanovllm.kernels.triton.common import can_copy_tiles, num_multiprocessors, shared_bytes

FEW = 64  # rows that are never rounded, and that `few_rows` takes
MOST_ROWS = 512  # of the kernel on Hopper GPUs; with more, dequantized weights are faster
OUTPUTS = 64  # of four warps
LEAST_STEPS = 2  # of a program, if others have the rest of K
MOST_STAGES = 4


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is divided."""

    rows: int
    outputs: int
    splits: int  # programs that share a tile of outputs, each with a part of the inputs
    stages: int  # tiles of inputs in flight
    warps: int = 4
    copies_x: bool = False  # by the tensor memory accelerator, as it does codes
    copies_scales: bool = True  # of groups
    runs: int = 1  # times `inner` inputs in a tile; codes of 4 bits have an even number


def most_rows(weight: ArrangedMatrix, dtype: torch.dtype) -> int:
    """The rows that the kernel multiplies faster than PyTorch does with a dequantized weight."""
    return MOST_ROWS if _has_wgmma(weight, dtype) else FEW


def choose_tiles(num_rows: int, weight: ArrangedMatrix, gated: bool, dtype: torch.dtype) -> Tiles:
    """The tiles for a product, from its shape alone."""
    runs = 2 if weight.kind == "int4" else 1
    choose = _wgmma_tiles if _has_wgmma(weight, dtype) else _other_tiles
    return choose(
        num_rows, weight.padded_in // (weight.inner * runs), weight.size_out // (1 + gated),
        weight.inner, runs, gated, weight.group > 0, dtype.itemsize,
        num_multiprocessors(weight.device), shared_bytes(weight.device),
    )  # fmt: skip


def _has_wgmma(weight: ArrangedMatrix, dtype: torch.dtype) -> bool:
    return dtype.itemsize == 2 and can_copy_tiles(weight.device)


@functools.cache
def _wgmma_tiles(
    num_rows: int, steps: int, size_out: int, inner: int, runs: int, gated: bool, grouped: bool,
    itemsize: int, processors: int, room: int,
) -> Tiles:  # fmt: skip
    """Tiles of which a processor holds a few at the same time.

    Each program reads all inputs of its rows from the cache, so that with many rows and outputs,
    tiles are twice as wide. Parts of K are for tiles that are too few; their sums are read and
    written once more, so there are fewer of them with more rows.
    """
    most = 128 if grouped or gated else 256  # by the registers for sums
    rows = next(size for size in (16, 32, 64, 128, 256) if num_rows <= size or size == most)
    groups = 2 if rows > 64 or (rows > 16 and size_out >= 2 * OUTPUTS * processors) else 1
    outputs = OUTPUTS * groups
    programs = triton.cdiv(num_rows, rows) * triton.cdiv(size_out, outputs)
    enough = 5 * processors // (2 * groups)
    splits, most_splits = 1, 8 if rows == 16 else 4
    while splits < most_splits and programs * splits < enough and steps >= 2 * splits * LEAST_STEPS:
        splits *= 2
    alone = rows == 256 or (rows == 128 and (grouped or gated))
    side_by_side = 1 if alone else 2 if groups == 2 else 4 if rows == 16 else 3
    # Codes leave shared memory when they become numbers, the rows when they were multiplied.
    codes, x = outputs * (1 + gated) * inner, rows * itemsize * runs * inner
    stages = max(2, min(MOST_STAGES, (room // side_by_side + codes) // (codes + x)))
    return Tiles(rows, outputs, splits, stages, 4 * groups, rows >= 32, runs=runs)


@functools.cache
def _other_tiles(
    num_rows: int, steps: int, size_out: int, inner: int, runs: int, gated: bool,
    grouped: bool,  # noqa: ARG001
    itemsize: int, processors: int, room: int,
) -> Tiles:  # fmt: skip
    """Tiles of which about three run on each processor. Not measured."""
    rows = next(size for size in (8, 16, 32) if num_rows <= size or size == 32)
    outputs = 32 if gated else 64
    programs = triton.cdiv(num_rows, rows) * triton.cdiv(size_out, outputs)
    splits, most_splits = 1, 8 if rows == 8 else 4
    while splits < most_splits and programs * splits < 3 * processors and steps >= 4 * splits:
        splits *= 2
    stage = (rows * itemsize * runs + outputs * (1 + gated)) * inner
    stages = max(2, min(MOST_STAGES, room // 3 // stage))
    return Tiles(rows, outputs, splits, stages, 4 if rows == 32 else 2, runs=runs)
