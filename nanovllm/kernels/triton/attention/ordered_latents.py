"""Attention to latent rows in one order of sums, as `ordered` describes it.

Tiles and letters are those of `latent_tiles`: the sums of M queries are (top, total, acc, rest),
with weighted values [COLUMNS, M] and, of rows whose value has more columns, [REST, M]. A tile of
keys has the same size for any number of queries.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.attention.latent_tiles import (
    MOST_SUMS,
    LatentTiles,
    latent_tiles,
    load_keys,
    no_sums,
    store_sums,
)
from nanovllm.kernels.triton.attention.ordered import fma, quotient, sum_of
from nanovllm.kernels.triton.attention.queries import NONE, sees
from nanovllm.kernels.triton.common import TILE, dot


def ordered_tiles(
    width: int, values: int, dtype: torch.dtype, device: torch.device, queries: int
) -> LatentTiles:
    """As `latent_tiles`, with as many keys as for the most queries."""
    keys = latent_tiles(width, values, dtype, device, TILE).keys
    return replace(latent_tiles(width, values, dtype, device, queries), keys=keys)


def warps_for(tiles: LatentTiles, values: int, queries: int) -> int:
    """The warps of a program, whose registers hold two sums for `queries`."""
    columns = tiles.columns + (tiles.rest if values > tiles.columns else 0)
    return 8 if 2 * columns * queries > MOST_SUMS else 4


@triton.jit
def none_yet(  # type: ignore[no-untyped-def]
    M: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr
):  # fmt: skip
    """The sums of M queries over no keys. A chunk begins with them."""
    top = tl.full([M], NONE, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc, rest = no_sums(M, V, COLUMNS, REST)
    return top, total, acc, rest


@triton.jit
def add_chunk(  # type: ignore[no-untyped-def]
    all_top, all_total, all_acc, all_rest, top, total, acc, rest, HAS_REST: tl.constexpr
):  # fmt: skip
    """Add the sums of a finished chunk to those of the chunks before it, as `ordered.add_chunk`."""
    new_top = tl.maximum(all_top, top)
    keep = tl.exp2(all_top - new_top)
    share = tl.exp2(top - new_top)
    all_total = fma(all_total, keep, total * share)
    all_acc = fma(all_acc, keep[None, :], acc * share[None, :])
    if HAS_REST:
        all_rest = fma(all_rest, keep[None, :], rest * share[None, :])
    return new_top, all_total, all_acc, all_rest


@triton.jit
def store_part(  # type: ignore[no-untyped-def]
    parts_ptr, sums_ptr, slot, asked, top, total, acc, rest,
    V: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Store sums in a slot: M rows of V numbers, and [2, M] with top and total.

    Those of queries that are not `asked` may see keys, and are zeros.
    """
    M: tl.constexpr = asked.shape[0]  # noqa: N806
    m = tl.arange(0, M)
    sums_at = sums_ptr + slot.to(tl.int64) * (2 * M) + m
    tl.store(sums_at, top)
    tl.store(sums_at + M, total)
    at = parts_ptr + (slot.to(tl.int64) * M + m)[:, None] * V
    column = tl.arange(0, COLUMNS)
    acc = tl.where(asked[None, :], acc, 0.0)
    kept = tl.broadcast_to((column < V)[None, :], [M, COLUMNS])
    tl.store(at + column[None, :], tl.trans(acc), mask=kept)
    if V > COLUMNS:
        more = COLUMNS + tl.arange(0, REST)
        rest = tl.where(asked[None, :], rest, 0.0)
        kept = tl.broadcast_to((more < V)[None, :], [M, REST])
        tl.store(at + more[None, :], tl.trans(rest), mask=kept)


@triton.jit
def fold_chunks(  # type: ignore[no-untyped-def]
    start, stop, q, q_rest, lens, begin, end, all_top, all_total, all_acc, all_rest,
    top, total, acc, rest, k_ptr, table_ptr, first_row, k_row_stride, scale_log2,
    parts_ptr, sums_ptr, first_slot, slot_step,
    W: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Add the keys [start, stop) of a sequence to a chunk's sums, and chunks that end to all sums.

    As `fold_keys`, in a fixed order. Unless `first_slot` is negative, a chunk is stored instead:
    chunk i in the slot `first_slot + i * slot_step`.
    """
    n = tl.arange(0, BLOCK_N)
    for key in tl.range(start, stop, BLOCK_N, num_stages=2):
        k, k_rest = load_keys(
            key, begin, end, k_ptr, table_ptr, first_row, k_row_stride, W, COLUMNS, REST,
            BLOCK_SIZE, BLOCK_N, WHOLE,
        )  # fmt: skip
        scores = dot(k, q, dot(k_rest, q_rest)) if REST else dot(k, q)
        if not WHOLE:
            visible = sees(lens[None, :], (key + n)[:, None], WINDOW)
            scores = tl.where(visible, scores, -float("inf"))
        factor = tl.full([], scale_log2, tl.float32)
        new_top = top
        weights = scores
        # Always. A condition ends the chain of the products: else the compiler would give each of
        # 8 warps whole rows of scores, which are too few, and compute them twice.
        if key >= start:
            new_top = tl.maximum(top, tl.max(scores, axis=0) * factor)
            weights = tl.exp2(fma(scores, factor, -new_top[None, :]))
            total = fma(total, tl.exp2(top - new_top), sum_of(weights, 0))
        shrink = tl.exp2(top - new_top)
        weights = weights.to(k.dtype)
        acc = dot(tl.trans(k), weights, acc * shrink[None, :])
        if V > COLUMNS:
            rest = dot(tl.trans(k_rest), weights, rest * shrink[None, :])
        top = new_top
        if ((key + BLOCK_N) % CHUNK == 0) | (key + BLOCK_N >= end):
            if first_slot >= 0:
                slot = first_slot + key // CHUNK * slot_step
                store_part(
                    parts_ptr, sums_ptr, slot, lens > 0, top, total, acc, rest, V, COLUMNS, REST
                )
            else:
                all_top, all_total, all_acc, all_rest = add_chunk(
                    all_top, all_total, all_acc, all_rest, top, total, acc, rest, V > COLUMNS
                )
            top, total, acc, rest = none_yet(lens.shape[0], V, COLUMNS, REST)
    return all_top, all_total, all_acc, all_rest, top, total, acc, rest


@triton.jit
def store_outputs(  # type: ignore[no-untyped-def]
    at, asked, total, acc, rest, V: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr
):  # fmt: skip
    """Write the outputs of queries to rows at `at` [M]."""
    acc = tl.trans(quotient(tl.trans(acc), total))
    if V > COLUMNS:
        rest = tl.trans(quotient(tl.trans(rest), total))
    store_sums(at, acc, rest, asked, V, COLUMNS, REST)
