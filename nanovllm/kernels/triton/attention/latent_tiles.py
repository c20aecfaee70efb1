"""Tiles of attention over latent rows, which are keys of all heads and, in part, their values.

N rows of a tile, M queries of a tile: pairs of a token and a head. W numbers of a row, of which the
first V are the value.

A row is divided at the largest power of two up to W: 576 numbers are tiles of 512 and 64 columns,
so that no column is computed in vain. Both products read the tile of keys from shared memory: keys
are the first operand of the scores [N, M], and transposed that of the sums [columns, M]. So few
queries are a narrow product, not a padded one, and queries take no registers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import next_power_of_2
from nanovllm.kernels.triton.attention.queries import sees
from nanovllm.kernels.triton.common import TILE, dot, shared_bytes

LEAST = 16  # columns, rows and queries of a product
MOST_COLUMNS = 512  # of the first tile
MOST_SUMS = 16384  # columns times queries: the sums that registers hold
WIDE_SHARED = 200 << 10  # GPUs with this much shared memory multiply from it
NARROW_BYTES = 512  # others multiply so many queries by rows of at most this many bytes
SPARE_SHARED = 16 << 10  # what `shared_bytes` leaves for others


@dataclass(frozen=True, slots=True)
class LatentTiles:
    """How rows and queries are divided; the same in all layers of a model."""

    columns: int  # of the first tile: all are numbers of the row
    rest: int  # of the second tile, padded to a power of two; 0: there is none
    keys: int  # N
    queries: int  # M, at most


def latent_tiles(
    width: int, values: int, dtype: torch.dtype, device: torch.device, queries: int
) -> LatentTiles:
    """Tiles for rows of `width` numbers, the first `values` as value, and `queries` of a sequence.

    Registers hold the sums, and shared memory the queries and two tiles of keys.
    """
    columns = next_power_of_2(width + 1) // 2
    rest = max(LEAST, next_power_of_2(width - columns)) if width > columns else 0
    padded = max(LEAST, next_power_of_2(queries))
    if dtype.itemsize > 2:  # no tensor cores
        return LatentTiles(columns, rest, LEAST, min(padded, LEAST))
    room = shared_bytes(device)
    row_bytes = (columns + rest) * dtype.itemsize
    most = min(TILE, MOST_SUMS // (columns + (rest if values > columns else 0)))
    if room < WIDE_SHARED and row_bytes > NARROW_BYTES:
        most = LEAST
    rows = min(padded, most)
    keys = TILE
    while keys > LEAST and (2 * keys + rows) * row_bytes + 2 * keys * rows > room + SPARE_SHARED:
        keys //= 2
    return LatentTiles(columns, rest, keys, rows)


@triton.jit
def load_keys(  # type: ignore[no-untyped-def]
    key, begin, end, k_ptr, table_ptr, first_row, k_row_stride,
    W: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The keys `key + [0, BLOCK_N)` of a sequence, [N, COLUMNS] and [N, REST].

    BLOCK_SIZE 0: key i is the row first_row + i. Keys outside of [begin, end) are not read, and
    zeros. WHOLE: there are none.
    """
    n = tl.arange(0, BLOCK_N)
    column = tl.arange(0, COLUMNS)
    if BLOCK_SIZE == 0:
        row = (first_row + key + n).to(tl.int64)
    elif BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64)
        row = block * BLOCK_SIZE + key % BLOCK_SIZE + n
    else:
        block = tl.load(table_ptr + (key + n) // BLOCK_SIZE, mask=key + n < end, other=0)
        row = block.to(tl.int64) * BLOCK_SIZE + (key + n) % BLOCK_SIZE
    k_at = k_ptr + row[:, None] * k_row_stride
    inside = (key + n < end) & (key + n >= begin)
    if WHOLE:
        k = tl.load(k_at + column[None, :])
    else:
        k = tl.load(k_at + column[None, :], mask=inside[:, None], other=0.0)
    k_rest = k
    if REST:
        rest = COLUMNS + tl.arange(0, REST)
        loaded = inside[:, None] & (rest < W)[None, :]
        k_rest = tl.load(k_at + rest[None, :], mask=loaded, other=0.0)
    return k, k_rest


@triton.jit
def fold_keys(  # type: ignore[no-untyped-def]
    start, stop, q, q_rest, lens, begin, end, top, total, acc, acc_rest, k_ptr, table_ptr,
    first_row, k_row_stride, scale_log2,
    W: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Add the keys [start, stop) of a sequence to the sums of queries q [COLUMNS, M].

    Query m sees the keys before lens[m]. WHOLE: all queries see all of these keys, and no window
    ends there. Keys are read as by `load_keys`.
    """
    n = tl.arange(0, BLOCK_N)
    for key in tl.range(start, stop, BLOCK_N, num_stages=2):
        k, k_rest = load_keys(
            key, begin, end, k_ptr, table_ptr, first_row, k_row_stride, W, COLUMNS, REST,
            BLOCK_SIZE, BLOCK_N, WHOLE,
        )  # fmt: skip
        scores = dot(k, q)
        if REST:
            scores = dot(k_rest, q_rest, scores)
        scores *= scale_log2
        if not WHOLE:
            scores = tl.where(
                sees(lens[None, :], (key + n)[:, None], WINDOW), scores, -float("inf")
            )
        new_top = tl.maximum(top, tl.max(scores, axis=0))
        weights = tl.exp2(scores - new_top[None, :])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, axis=0)
        weights = weights.to(k.dtype)
        acc = dot(tl.trans(k), weights, acc * shrink[None, :])
        if V > COLUMNS:
            acc_rest = dot(tl.trans(k_rest), weights, acc_rest * shrink[None, :])
        top = new_top
    return top, total, acc, acc_rest


@triton.jit
def load_queries(  # type: ignore[no-untyped-def]
    q_at, asked, W: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr
):  # fmt: skip
    """The queries at `q_at` [M], as columns: [COLUMNS, M] and [REST, M]; zeros if not `asked`."""
    column = tl.arange(0, COLUMNS)
    q = tl.load(q_at[:, None] + column[None, :], mask=asked[:, None], other=0.0)
    q_rest = q
    if REST:
        rest = COLUMNS + tl.arange(0, REST)
        loaded = asked[:, None] & (rest < W)[None, :]
        q_rest = tl.load(q_at[:, None] + rest[None, :], mask=loaded, other=0.0)
    return tl.trans(q), tl.trans(q_rest)


@triton.jit
def no_sums(  # type: ignore[no-untyped-def]
    M: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr
):  # fmt: skip
    """The sums of M queries over no keys: of weighted values, and of the rest of the columns."""
    acc = tl.zeros([COLUMNS, M], tl.float32)
    acc_rest = tl.zeros([REST, M], tl.float32) if V > COLUMNS else 0.0
    return acc, acc_rest


@triton.jit
def store_sums(  # type: ignore[no-untyped-def]
    at, acc, acc_rest, asked, V: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr
):  # fmt: skip
    """Write the first V columns of sums to rows at `at` [M]."""
    column = tl.arange(0, COLUMNS)
    kept = asked[:, None] & (column < V)[None, :]
    tl.store(at[:, None] + column[None, :], tl.trans(acc).to(at.dtype.element_ty), mask=kept)
    if V > COLUMNS:
        rest = COLUMNS + tl.arange(0, REST)
        kept = asked[:, None] & (rest < V)[None, :]
        sums = tl.trans(acc_rest).to(at.dtype.element_ty)
        tl.store(at[:, None] + rest[None, :], sums, mask=kept)
