"""How `few_rows` divides products of few rows into tiles."""

import functools
from dataclasses import dataclass

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.triton.common import ROOM

LEAST = 16  # the sizes of matrices that tensor cores multiply are multiples of this
MANY_INPUTS = 1024  # from which on one tile with zeros costs less than small tiles
SHARED_BYTES = {1: 208 << 10, 2: 104 << 10}  # for tiles, by the programs on a multiprocessor


@dataclass(frozen=True, slots=True)
class FewRowsTiles:
    """The division of a product into tiles. Outputs divide the size; a last tile has zeros."""

    rows: int
    outputs: int
    inputs: int  # inputs of a tile
    stages: int  # tiles of inputs in flight
    side_by_side: int  # programs on a multiprocessor


@functools.cache
def tiles_for(
    num_rows: int, size_in: int, size_out: int, gated: bool, processors: int
) -> FewRowsTiles:
    """The tiles that were fastest for the layers of Qwen3-0.6B, 1.7B, 4B and 8B.

    These are the smallest tiles with which all programs run at the same time, one on each
    multiprocessor. If there are none: two on each. Else the largest tiles.
    """
    sizes = [rows for rows in (16, 32, 64, ROOM) if rows < 2 * max(num_rows, LEAST)]
    alone = [(rows, 64, 1) for rows in sizes if not (gated and rows == ROOM)]
    if gated and num_rows <= 16:
        alone.append((16, 128, 1))
    for rows, most, side_by_side in [*alone, *((rows, 64, 2) for rows in sizes)]:
        outputs = _divisor(size_out, most)
        programs = cdiv(num_rows, rows) * size_out // outputs
        if programs <= side_by_side * processors:
            break
    most = 64 if side_by_side == 2 else 256 if rows <= 32 and not gated else 128
    inputs = _divisor(size_in, most)
    if inputs < 128 <= most and size_in >= MANY_INPUTS:
        inputs = 128  # the last tile ends with zeros
    tile_bytes = (rows + outputs * (1 + gated)) * inputs * 2
    stages = SHARED_BYTES[side_by_side] // tile_bytes
    return FewRowsTiles(rows, outputs, inputs, min(6, stages), side_by_side)


def _divisor(size: int, most: int) -> int:
    """The largest power of two that divides `size`, at most `most`."""
    return min(most, size & -size)
