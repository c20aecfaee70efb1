"""From a checkpoint's tensors to a QuantizedMatrix: codes, and the scales of even blocks.

A rank's part of a matrix may begin and end inside a block, projections are joined that are not
multiples of a block, and a checkpoint may assign columns to groups in any order. Kernels read
blocks of one size, so blocks are divided, and columns are sorted by their groups.
"""

import itertools
import math
from collections.abc import Sequence

import torch

from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix

PADDED = 32  # columns: groups that need padding are padded to multiples of it
LEAST = 16  # columns, that kernels multiply at a time: they need multiples of it in a block


def places(parts: Sequence[slice], unit: int, device: torch.device) -> torch.Tensor:
    """The places of rows in a joined tensor that has one element for `unit` rows.

    `parts` are the rows of each projection, which has all elements that are for any of them.
    """
    found, first = [], 0
    for part in parts:
        start, stop = part.start // unit * unit, -(-part.stop // unit) * unit
        found.append(torch.arange(part.start - start, part.stop - start, device=device) + first)
        first += stop - start
    return torch.cat(found)


def unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The unsigned codes in 32-bit words, the lowest bits first, along the dimension `dim`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    codes = (words.movedim(dim, -1)[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(-2).movedim(-1, dim)


def take(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """The elements `index` along `dim`; the tensor itself if those are all, in order."""
    if torch.equal(index, torch.arange(tensor.shape[dim], device=index.device)):
        return tensor
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).index_select(dim, index).view(tensor.dtype)
    return tensor.index_select(dim, index)


def quantized_matrix(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    row_blocks: torch.Tensor,
    column_blocks: torch.Tensor,
    bits: int,
    rounds_inputs: bool = False,
    input_scale: torch.Tensor | None = None,
) -> QuantizedMatrix:
    """The matrix of codes [..., N, K], with the row and column of each one's scale.

    `row_blocks` [N] are in order. `column_blocks` [K] may not be: then columns are sorted. Syncs.
    """
    order = None
    if bool((column_blocks.diff() < 0).any()):
        column_blocks, order = column_blocks.sort(stable=True)
        codes = take(codes, -1, order)
    rows, columns = _block_size(row_blocks), _block_size(column_blocks)
    if columns % LEAST and columns < len(column_blocks):
        unit = PADDED if int(_runs(column_blocks)[1].max()) > LEAST else LEAST
        column_blocks, kept = _with_padding(column_blocks, unit)
        of_zero = 0 if zeros is None else zeros[..., row_blocks, :][..., column_blocks]
        codes = torch.where(kept < 0, of_zero, codes[..., kept.clamp(min=0)])
        order = kept if order is None else order[kept]
        order, columns = order.where(kept >= 0, 0), unit
    picked_rows, picked_columns = row_blocks[::rows], column_blocks[::columns]

    def of_blocks(values: torch.Tensor) -> torch.Tensor:
        return take(take(values, -2, picked_rows), -1, picked_columns).contiguous()

    return QuantizedMatrix(
        codes.contiguous(), of_blocks(scales), None if zeros is None else of_blocks(zeros),
        (rows, columns), bits, order, rounds_inputs, input_scale,
    )  # fmt: skip


def _runs(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks in order, and how many rows or columns each one has."""
    found, counts = torch.unique_consecutive(blocks, return_counts=True)
    return found, counts


def _block_size(blocks: torch.Tensor) -> int:
    """The largest size of even blocks that have one scale each; the last one may be cut off."""
    starts = [*itertools.accumulate(_runs(blocks)[1].tolist())][:-1]
    return math.gcd(*starts) or max(1, len(blocks))


def _with_padding(blocks: torch.Tensor, unit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks padded to multiples of `unit` columns: each column's block, and its place.

    The place of a column of padding is -1.
    """
    found, counts = _runs(blocks)
    padded = -(-counts // unit) * unit
    firsts = counts.cumsum(0) - counts
    within = torch.cat([torch.arange(n, device=blocks.device) for n in padded.tolist()])
    place = within + firsts.repeat_interleave(padded)
    kept = place.where(within < counts.repeat_interleave(padded), -1)
    return found.repeat_interleave(padded), kept


def check_scales(name: str, scales: torch.Tensor, of_inputs: bool = False) -> torch.Tensor:
    """Return the scales if they are finite, and above 0 if inputs are divided by them. Syncs."""
    low_and_high = torch.stack(scales.aminmax()).tolist() if scales.numel() else []  # or NaN
    for scale in low_and_high:
        if not math.isfinite(scale) or (of_inputs and scale <= 0):
            allowed = "finite and above 0" if of_inputs else "finite"
            raise ValueError(f"{name} must be {allowed}, got {scale}")
    return scales
