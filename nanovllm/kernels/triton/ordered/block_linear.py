"""Linear layers with weights in GGUF's blocks, with one order of sums for any number of rows.

Inputs are divided into parts by the weight and the GPU alone, as `block_products` divides them for
few rows. A part is added up as in `linear`, and then the parts, in their order: by the last of the
programs that share a tile of few rows, or by the one program of a tile of more rows. If there is
one part, many rows are multiplied as rows of plain weights.
"""

import itertools
from dataclasses import replace

import torch

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.operands.block_matrix import BlockMatrix
from nanovllm.kernels.triton.common import num_multiprocessors
from nanovllm.kernels.triton.linear import block_planes
from nanovllm.kernels.triton.linear.block_dequantize import dequantize_blocks
from nanovllm.kernels.triton.linear.block_linear import MOST_ROWS
from nanovllm.kernels.triton.linear.block_planes import BlockPlanes
from nanovllm.kernels.triton.linear.block_products import SAME_ROWS, choose_block_tiles, launch
from nanovllm.kernels.triton.linear.row_outputs import RowOperands
from nanovllm.kernels.triton.linear.row_tiles import RowTiles
from nanovllm.kernels.triton.ordered.linear import agreeing, arrange_plain, ordered_linear

TYPES = (torch.bfloat16, torch.float16)  # of rows that cuBLAS may multiply
MOST_NUMBERS = 1 << 30  # of rows in a launch, whose offsets have 32 bits
# Tiles of many rows: registers hold the sums of a part, and of the parts before it.
LARGE, SMALL = RowTiles(128, 128, 1, 3, 8), RowTiles(128, 64, 1, 3)


def arrange_blocks(weight: BlockMatrix) -> BlockPlanes:
    """As the twin. Compares cuBLAS with our kernel before graphs are captured, which must not sync.

    The blocks do not say which type rows will have. Peak memory: as `agreeing`.
    """
    planes = block_planes.arrange_blocks(weight)
    if parts_of(planes) == 1:
        for dtype, has_bias in itertools.product(TYPES, (False, True)):
            agreeing(planes.shape, dtype, planes.device, has_bias)
    return planes


def parts_of(weight: BlockPlanes) -> int:
    """The parts of the weight's inputs."""
    return choose_block_tiles(1, weight).splits


def block_linear(
    x: torch.Tensor, weight: BlockPlanes, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias` for x [T, K]. Values are rounded to the type of x, and rows are not.

    Peak memory: the matrix in the type of x, for more than MOST_ROWS rows and a single part.
    """
    parts = parts_of(weight)
    if parts == 1 and len(x) > MOST_ROWS:
        dense = dequantize_blocks(weight, x.dtype)
        return ordered_linear(x, arrange_plain(dense, has_bias=bias is not None), bias)
    x, out = x.contiguous(), x.new_empty(len(x), weight.shape[0])
    most = MOST_NUMBERS // max(weight.shape)
    for start in range(0, len(x), most):
        part = slice(start, min(start + most, len(x)))
        tiles = tiles_of(part.stop - start, weight, parts)
        launch(RowOperands(x[part], bias, out[part]), weight, tiles)
    return out


def tiles_of(num_rows: int, weight: BlockPlanes, parts: int) -> RowTiles:
    """The tiles of a product. Up to SAME_ROWS rows, programs share them."""
    tiles = choose_block_tiles(num_rows, weight)
    if num_rows <= SAME_ROWS:
        assert tiles.splits == parts
        return tiles
    if parts == 1:
        return replace(tiles, splits=1)
    programs = cdiv(num_rows, LARGE.rows) * cdiv(weight.shape[0], LARGE.outputs)
    is_large = programs >= 2 * num_multiprocessors(weight.device)
    return replace(LARGE if is_large else SMALL, parts=parts)
