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
MOST_AHEAD = 64  # columns of the rest of a tile that registers hold
NARROW_BYTES = 512  # others multiply so many queries by rows of at most this many bytes
SPARE_SHARED = 16 << 10  # what `shared_bytes` leaves for others


@dataclass(frozen=True, slots=True)
class LatentTiles:
    """How rows and queries are divided; the same in all layers of a model."""

    columns: int  # of the first tile: all are numbers of the row
    rest: int  # of the second tile, padded to a power of two; 0: there is none
    keys: int  # N
    queries: int  # M, at most
    stages: int = 2  # of the loop over copied tiles
    programs: int = 1  # of a multiprocessor: two where one cannot load tiles while it computes

    @property
    def loads_ahead(self) -> bool:
        """Whether the rest of the next tile is loaded into registers."""
        return self.stages != 2 and 0 < self.rest <= MOST_AHEAD

    def can_be_copied(self, rows: torch.Tensor, block_size: int) -> bool:
        """Whether the tensor memory accelerator can copy tiles of rows [..., W]."""
        aligned = rows.shape[-1] * rows.itemsize % 16 == 0 and rows.data_ptr() % 16 == 0
        return aligned and rows.itemsize == 2 and block_size % self.keys == 0


def latent_tiles(
    width: int, values: int, dtype: torch.dtype, device: torch.device, queries: int
) -> LatentTiles:
    """Tiles for rows of `width` numbers, the first `values` as value, and `queries` of a sequence.

    Registers hold the sums, and shared memory the queries and tiles of keys: with room for three,
    a program copies two ahead; else a multiprocessor has two programs, with a tile each.
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
    if room < WIDE_SHARED:
        return LatentTiles(columns, rest, keys, rows)
    others = rows * row_bytes + 2 * keys * rows  # queries and weights
    ahead = rest if rest <= MOST_AHEAD else 0
    copied = 3 * (columns + rest - ahead) + ahead
    if keys * copied * dtype.itemsize + others <= room + SPARE_SHARED:
        return LatentTiles(columns, rest, keys, rows, 3)
    return LatentTiles(columns, rest, keys, rows, 1, 2)


@triton.jit
def load_rest(  # type: ignore[no-untyped-def]
    k_ptr, table_ptr, first_row, key, stop, k_row_stride,
    W: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The columns after the first COLUMNS of a whole tile, if `key` is before `stop`."""
    if BLOCK_SIZE:
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < stop, other=0)
        row = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
    else:
        row = (first_row + key).to(tl.int64)
    rest = COLUMNS + tl.arange(0, REST)
    at = k_ptr + (row + tl.arange(0, BLOCK_N))[:, None] * k_row_stride + rest[None, :]
    return tl.load(at, mask=(key < stop) & (rest < W)[None, :], other=0.0)


@triton.jit
def fold_keys(  # type: ignore[no-untyped-def]
    start, stop, q, q_rest, lens, begin, end, top, total, acc, acc_rest, k_ptr, tiles, rest_tiles,
    table_ptr, first_row, k_row_stride, scale_log2,
    W: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, COPIED: tl.constexpr,
    WHOLE: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Add the keys [start, stop) of a sequence to the sums of queries q [COLUMNS, M].

    Query m sees the keys before lens[m]. WHOLE: all queries see all of these keys, and no window
    ends there. BLOCK_SIZE 0: key i is the row first_row + i. Keys outside of [begin, end) are not
    read.

    A copy begins after the products with the tile that it replaces. So a loop of three stages has
    two tiles in flight while it computes; one of two stages has none. Three whole tiles of wide
    rows are more than shared memory holds: with AHEAD, registers hold the rest of the next tile.
    """
    n = tl.arange(0, BLOCK_N)
    column = tl.arange(0, COLUMNS)
    PREFETCHED: tl.constexpr = AHEAD and COPIED and WHOLE  # noqa: N806
    next_rest = 0.0
    if PREFETCHED:
        next_rest = load_rest(
            k_ptr, table_ptr, first_row, start, stop, k_row_stride, W, COLUMNS, REST, BLOCK_SIZE,
            BLOCK_N,
        )  # fmt: skip
    # Loads of blocks' numbers take as many stages as the copies of blocks.
    FOUND: tl.constexpr = 2 if STAGES == 3 and BLOCK_SIZE > 0 else 0  # noqa: N806
    for key in tl.range(start, stop, BLOCK_N, num_stages=STAGES + FOUND):
        if COPIED and WHOLE:
            if BLOCK_SIZE:
                at = tl.load(table_ptr + key // BLOCK_SIZE) * BLOCK_SIZE + key % BLOCK_SIZE
            else:
                at = first_row + key
            k = tiles.load([at, 0])
            k_rest = k
            if PREFETCHED:
                k_rest = next_rest
                next_rest = load_rest(
                    k_ptr, table_ptr, first_row, key + BLOCK_N, stop, k_row_stride, W, COLUMNS,
                    REST, BLOCK_SIZE, BLOCK_N,
                )  # fmt: skip
            elif REST:
                k_rest = rest_tiles.load([at, COLUMNS])
        else:
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
