"""The two products of a layer of experts for many pairs of a token and an expert (prompts).

T tokens, K experts of each, N = T * K pairs, E experts of this rank, H hidden size, I inputs of an
expert's second matrix.

The first launch computes gate, up and their activation. Its results are in the order of experts, so
that the second launch reads whole tiles of them. Sums are float32, and a result is rounded once. On
Hopper GPUs the tensor memory accelerator copies the tiles of weights and of these results. Its
description of the weights has a dimension for the matrices of a stack, so that no tile extends from
one matrix into the next; gate and up are a tile of two matrices.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.triton.common import can_copy_tiles, dot, num_multiprocessors, tiles_of
from nanovllm.kernels.triton.experts.grouping import tile_pairs
from nanovllm.kernels.triton.linear.silu_and_mul import gated, gated_as_stored

TOGETHER = 8  # tiles of rows for which neighbouring programs read the same weights
ALIGNED = 16  # if rows are a multiple of this long, several numbers are loaded at a time
LARGE, SMALL = 128, 64  # rows of a tile
LEAST_OF_LARGE = 64  # pairs of an expert, on average, from which tiles are large
LEAST_COPIED, LEAST = 4, 32  # pairs of an expert, on average, from which these kernels are used


@dataclass(frozen=True, slots=True)
class PairTiles:
    """The tiles of a product, except for their rows."""

    outputs: int  # of each matrix
    inputs: int  # at a time
    stages: int
    warps: int


# For gate and up, and for the second matrix; measured on Hopper GPUs.
COPIED = {
    LARGE: (PairTiles(128, 64, 4, 8), PairTiles(128, 64, 3, 4)),
    SMALL: (PairTiles(128, 64, 4, 4), PairTiles(128, 64, 3, 4)),
}
LOADED = (PairTiles(64, 64, 3, 4), PairTiles(128, 64, 3, 4))


@triton.jit
def tile_of(  # type: ignore[no-untyped-def]
    program, num_tiles, columns, tiles_ptr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """A program's expert, its first place, the end of the expert's places, and its column."""
    first = program // (TOGETHER * columns) * TOGETHER
    height = tl.minimum(num_tiles - first, TOGETHER)
    inside = program - first * columns
    tile_at = tiles_ptr + (first + inside % height) * 3
    return tl.load(tile_at), tl.load(tile_at + 1), tl.load(tile_at + 2), inside // height


@triton.jit
def _multiply(  # type: ignore[no-untyped-def]
    x_at, x_tiles, first, weight_ptr, weight_tiles, matrix, first_n, size_in, size_out,
    MATRICES: tl.constexpr, EVEN: tl.constexpr, COPIED: tl.constexpr, COPIED_X: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply rows by outputs of MATRICES matrices in a stack: [BLOCK_M, MATRICES * BLOCK_N].

    The rows are at x_at, or from `first` on if COPIED_X. Results are undefined for outputs that do
    not exist.
    """
    k = tl.arange(0, BLOCK_K)
    if not COPIED:
        row = tl.arange(0, MATRICES * BLOCK_N)
        n = tl.minimum(first_n + row % BLOCK_N, size_out - 1)
        row = (matrix + row // BLOCK_N).to(tl.int64) * size_out + n
        weight_at = weight_ptr + row[:, None] * size_in + k[None, :]
    acc = tl.zeros((BLOCK_M, MATRICES * BLOCK_N), tl.float32)
    for at in tl.range(0, size_in, BLOCK_K, num_stages=STAGES):
        inside = (k < size_in - at)[None, :]
        if COPIED_X:
            x = x_tiles.load([first, at])
        elif EVEN:
            x = tl.load(x_at + at)
        else:
            x = tl.load(x_at + at, mask=inside, other=0.0)
        if COPIED:
            weight = weight_tiles.load([matrix, first_n, at])
            weight = weight.reshape(MATRICES * BLOCK_N, BLOCK_K)
        elif EVEN:
            weight = tl.load(weight_at + at)
        else:
            weight = tl.load(weight_at + at, mask=inside, other=0.0)
        acc = dot(x, tl.trans(weight), acc)
    return acc


@triton.jit
def _gated_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, weight_tiles, out_ptr, order_ptr, tiles_ptr, num_tiles_ptr, size_in, size,
    PER_ROW: tl.constexpr, ROUNDED: tl.constexpr, EVEN: tl.constexpr, COPIED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TOGETHER: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_N results of one tile's pairs; surplus programs do nothing.

    ROUNDED: gates and ups are rounded to the type of the results before the activation.
    """
    program, columns, num_tiles = tl.program_id(0), tl.cdiv(size, BLOCK_N), tl.load(num_tiles_ptr)
    if program < num_tiles * columns:
        expert, first, end, column = tile_of(program, num_tiles, columns, tiles_ptr, TOGETHER)
        place = first + tl.arange(0, BLOCK_M)
        pair = tl.load(order_ptr + tl.minimum(place, end - 1))
        x_at = x_ptr + (pair // PER_ROW).to(tl.int64)[:, None] * size_in
        x_at += tl.arange(0, BLOCK_K)[None, :]
        first_n = column * BLOCK_N
        acc = _multiply(
            x_at, None, first, weight_ptr, weight_tiles, 2 * expert, first_n, size_in, size,
            2, EVEN, COPIED, False, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
        gate, up = tl.split(acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1))
        if ROUNDED:
            like = out_ptr.dtype.element_ty
            out = gated_as_stored(gate.to(like), up.to(like))
        else:
            out = gated(gate, up)
        n = first_n + tl.arange(0, BLOCK_N)
        out_at = out_ptr + place.to(tl.int64)[:, None] * size + n[None, :]
        real = (place < end)[:, None] & (n < size)[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _down_kernel(  # type: ignore[no-untyped-def]
    x_ptr, x_tiles, weight_ptr, weight_tiles, out_ptr, order_ptr, tiles_ptr, num_tiles_ptr,
    shares_ptr, size_in, size_out, EVEN: tl.constexpr, COPIED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TOGETHER: tl.constexpr, PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One of PROGRAMS programs; it reads its next tile while it stores the last one."""
    columns, num_tiles = tl.cdiv(size_out, BLOCK_N), tl.load(num_tiles_ptr)
    for program in tl.range(tl.program_id(0), num_tiles * columns, PROGRAMS, flatten=COPIED):
        expert, first, end, column = tile_of(program, num_tiles, columns, tiles_ptr, TOGETHER)
        place = first + tl.arange(0, BLOCK_M)
        inside = tl.minimum(place, end - 1)
        x_at = x_ptr + inside.to(tl.int64)[:, None] * size_in + tl.arange(0, BLOCK_K)[None, :]
        first_n = column * BLOCK_N
        acc = _multiply(
            x_at, x_tiles, first, weight_ptr, weight_tiles, expert, first_n, size_in, size_out,
            1, EVEN, COPIED, COPIED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
        pair = tl.load(order_ptr + inside).to(tl.int64)
        acc *= tl.load(shares_ptr + pair)[:, None]
        n = first_n + tl.arange(0, BLOCK_N)
        out_at = out_ptr + pair[:, None] * size_out + n[None, :]
        real = (place < end)[:, None] & (n < size_out)[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=real)


def takes(x: torch.Tensor, down: torch.Tensor, num_pairs: int, num_experts: int) -> bool:
    """Whether `multiply` is faster than `grouped_linear` for rows x and `num_pairs` pairs."""
    least = LEAST_COPIED if can_copy_tiles(x.device) else LEAST
    aligned = not any(size % ALIGNED for size in down.shape[1:])
    return aligned and x.itemsize == 2 and num_pairs >= least * num_experts


def rows_of_tile(num_pairs: int, num_experts: int) -> int:
    """The pairs of a tile, by the mean number of pairs of an expert."""
    return LARGE if num_pairs >= LEAST_OF_LARGE * num_experts else SMALL


def multiply(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
    rounded: bool = False,
) -> torch.Tensor:
    """The outputs [N, H] of all pairs, times their shares, rounded to the type of x.

    If `rounded`, so are gates and ups before their activation. The outputs of other ranks' experts
    are not written. Peak memory: N rows of I, and N rows of H.
    """
    (num_here, hidden, size), per_row = down.shape, expert_ids.shape[1]
    assert x.is_contiguous() and gate_up.is_contiguous() and down.is_contiguous()
    rows = rows_of_tile(expert_ids.numel(), num_experts)
    copied = can_copy_tiles(x.device)
    first, second = COPIED[rows] if copied else LOADED
    pairs = tile_pairs(expert_ids, num_here, rows)
    inner = x.new_empty(len(pairs.order), size)
    table = pairs.order, pairs.tiles, pairs.num_tiles
    _gated_kernel[(len(pairs.tiles) * cdiv(size, first.outputs),)](
        x, gate_up, _matrices(gate_up.view(-1, size, hidden), 2, first) if copied else None,
        inner, *table, hidden, size, PER_ROW=per_row, ROUNDED=rounded,
        EVEN=hidden % first.inputs == 0, COPIED=copied, BLOCK_M=rows, BLOCK_N=first.outputs,
        BLOCK_K=first.inputs, TOGETHER=TOGETHER, STAGES=first.stages, num_warps=first.warps,
    )  # fmt: skip
    out = x.new_empty(len(inner), hidden)
    programs = 2 * num_multiprocessors(x.device)
    _down_kernel[(programs,)](
        inner, tiles_of(inner, rows, second.inputs) if copied else None,
        down, _matrices(down, 1, second) if copied else None,
        out, *table, shares, size, hidden, EVEN=size % second.inputs == 0, COPIED=copied,
        BLOCK_M=rows, BLOCK_N=second.outputs, BLOCK_K=second.inputs, TOGETHER=TOGETHER,
        PROGRAMS=programs, STAGES=second.stages, num_warps=second.warps,
    )  # fmt: skip
    return out


def _matrices(stack: torch.Tensor, matrices: int, tiles: PairTiles) -> TensorDescriptor:
    """Describe a stack to the accelerator, for tiles of neighbouring matrices in it."""
    block = [matrices, tiles.outputs, tiles.inputs]
    return TensorDescriptor(stack, list(stack.shape), list(stack.stride()), block)
