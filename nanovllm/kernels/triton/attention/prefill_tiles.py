"""What `prefill_attention` and `ordered_prefill` share: tiles of queries, and tiles of keys.

T query tokens, S sequences, G query heads of a key head, D head dimension.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import next_power_of_2
from nanovllm.kernels.triton.attention.queries import surplus_row
from nanovllm.kernels.triton.common import TILE, cache_offsets


@triton.jit
def load_tile(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, k_tiles, v_tiles, k_scales_ptr, v_scales_ptr, table_ptr, key, begin, end,
    first_row, kv_head, k_row_stride, k_head_stride, v_row_stride, v_head_stride, num_kv_heads,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, COPIED: tl.constexpr, CODES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The keys and values from `key` on, and the scales of codes.

    They are in the cache, or the step's own if BLOCK_SIZE is 0. Only MASKED tiles may have keys
    that are not in [begin, end). CODES: columns are pairs.
    """
    WIDTH: tl.constexpr = D // 2 if CODES else D  # noqa: N806
    w = tl.arange(0, BLOCK_D // 2 if CODES else BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    k_scale, v_scale = 0.0, 0.0  # None is no result in Triton 3.6
    if COPIED and not MASKED:
        k = k_tiles.load([first_row + key, kv_head * D])
        v = v_tiles.load([first_row + key, kv_head * D])
    else:
        if BLOCK_SIZE:
            k_at, scale_at = cache_offsets(
                table_ptr, key, end, kv_head, num_kv_heads, WIDTH, BLOCK_SIZE, BLOCK_N
            )
            v_at = k_at
        else:
            row = (first_row + key).to(tl.int64)
            k_at = row * k_row_stride + kv_head * k_head_stride + n * k_row_stride
            v_at = row * v_row_stride + kv_head * v_head_stride + n * v_row_stride
        k_at = k_ptr + k_at[:, None] + w[None, :]
        v_at = v_ptr + v_at[:, None] + w[None, :]
        if MASKED or w.shape[0] > WIDTH:
            inside = key + n < end
            if WINDOW:  # blocks before the window may belong to another sequence now
                inside &= key + n >= begin
            loaded = inside[:, None] & (w < WIDTH)[None, :]
            k = tl.load(k_at, mask=loaded, other=0)
            v = tl.load(v_at, mask=loaded, other=0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        if CODES:
            if MASKED:
                k_scale = tl.load(k_scales_ptr + scale_at, mask=inside, other=1.0)
                v_scale = tl.load(v_scales_ptr + scale_at, mask=inside, other=1.0)
            else:
                k_scale = tl.load(k_scales_ptr + scale_at)
                v_scale = tl.load(v_scales_ptr + scale_at)
    return k, v, k_scale, v_scale


@triton.jit
def visible_keys(  # type: ignore[no-untyped-def]
    keys, position, end, WINDOW: tl.constexpr, CODES: tl.constexpr
):  # fmt: skip
    """Which queries [M] at positions see which keys [N]: [M, N], or [N, M] for CODES."""
    inside = keys < end
    if CODES:
        visible = inside[:, None] & (keys[:, None] <= position[None, :])
        if WINDOW:
            visible &= keys[:, None] > position[None, :] - WINDOW
    else:
        visible = inside[None, :] & (keys[None, :] <= position[:, None])
        if WINDOW:
            visible &= keys[None, :] > position[:, None] - WINDOW
    return visible


@triton.jit
def clear_surplus(  # type: ignore[no-untyped-def]
    out_ptr, number, head, m, cu_q_ptr, tile_ends_ptr, num_rows, num_seqs, num_kv_heads,
    G: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write zeros to the rows of a surplus tile, which belong to no sequence."""
    d = tl.arange(0, BLOCK_D)
    first = surplus_row(number, cu_q_ptr, tile_ends_ptr, num_seqs, BLOCK_Q)
    row = (first + m // BLOCK_G).to(tl.int64)
    at = out_ptr + (row * num_kv_heads * G + head)[:, None] * D + d[None, :]
    unused = (row < num_rows) & (m % BLOCK_G < G)
    nothing = tl.zeros([BLOCK_Q * BLOCK_G, BLOCK_D], out_ptr.dtype.element_ty)
    tl.store(at, nothing, mask=unused[:, None] & (d < D)[None, :])


@triton.jit
def queries_of(  # type: ignore[no-untyped-def]
    number, seq, m, cu_q_ptr, cu_k_ptr, tile_ends_ptr,
    G: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """A tile's queries m: their numbers in the sequence, which ones are real, and their rows.

    Then the sequence's first row, its numbers of queries and keys, and the position of the tile's
    first query.
    """
    # Tiles are counted from a sequence's end, so that those with the most keys start first.
    tile = tl.load(tile_ends_ptr + seq) - 1 - number
    first_row = tl.load(cu_q_ptr + seq)
    num_queries = tl.load(cu_q_ptr + seq + 1) - first_row
    num_keys = tl.load(cu_k_ptr + seq + 1) - tl.load(cu_k_ptr + seq)
    query = tile * BLOCK_Q + m // BLOCK_G
    inside = (query < num_queries) & (m % BLOCK_G < G)
    row = (first_row + query).to(tl.int64)
    first_position = num_keys - num_queries + tile * BLOCK_Q
    return query, inside, row, first_row, num_queries, num_keys, first_position


@triton.jit
def keys_of(  # type: ignore[no-untyped-def]
    first_position, num_keys, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """The keys [begin, end) that a tile's queries see.

    Then the start of the first tile of keys, and of the first one that needs a mask.
    """
    end = tl.minimum(first_position + BLOCK_Q, num_keys)
    begin = 0
    start = 0
    seen_by_all = (first_position + 1) // BLOCK_N * BLOCK_N
    if WINDOW:
        begin = tl.maximum(first_position + 1 - WINDOW, 0)
        start = begin // BLOCK_N * BLOCK_N
        seen_by_all = start  # any tile may be at the edge of some query's window
    return begin, end, start, seen_by_all


def tile_queries(group: int, head_dim: int, dtype: torch.dtype) -> int:
    """Queries of a tile: with G = `group` heads each, as many rows as registers hold."""
    rows = 64 if dtype.itemsize <= 2 and head_dim <= 256 else 16
    return max(1, rows // next_power_of_2(group))


def tiles_in_flight(block_n: int, is_paged: bool) -> int:
    """The number that was the fastest, or as many as fit in shared memory."""
    return 1 if block_n == 16 else 2 if is_paged or block_n < TILE else 3


def is_matrix_of_heads(x: torch.Tensor) -> bool:
    """Whether tiles of keys x [T, KVH, D] can be copied: 16 bits, contiguous heads, aligned."""
    head_dim = x.shape[2]
    whole = x.stride(1) == head_dim == next_power_of_2(head_dim)
    return whole and x.dtype.itemsize == 2 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
