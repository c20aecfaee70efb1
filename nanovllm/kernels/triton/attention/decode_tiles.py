"""What `decode_attention` and `ordered_decode` share: a launch, its queries, its tiles of keys.

B sequences, Q queries of each, H query heads, KVH key heads, G = H / KVH, D head dimension. CODES:
the cache has pairs of codes, and a tile has D / 2 columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.kernels.triton.attention.decode_plan import HALF, DecodePlan
from nanovllm.kernels.triton.attention.kv_codes import as_pairs
from nanovllm.kernels.triton.attention.queries import sees
from nanovllm.kernels.triton.common import (
    LOG2E,
    TILE,
    cache_offsets,
    cap_log2,
    converts_codes,
    early,
    tile_keys,
    tiles_of,
)

if TYPE_CHECKING:
    from nanovllm.kernels.triton.attention.ordered_plan import OrderedDecodePlan

MOST_QUERIES = 64  # queries of a key head in a program: as many as registers hold
NEXT_FIRST_ROWS = 32  # up to this many rows, the next kernel begins at the start of this one
MOST_COPIED = 256  # the largest heads whose tiles are copied
CODES_STAGES = 5  # stages for codes: two tiles are in flight


@triton.jit
def queries_of(  # type: ignore[no-untyped-def]
    q_ptr, row, kv_head, g, row_stride, head_stride,
    ROWS: tl.constexpr, FIRST: tl.constexpr, Q: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """The addresses of a sequence's queries g, their heads, and the first one's row."""
    head = kv_head * G + (g % G if Q > 1 else g)
    wide_row = row.to(tl.int64)
    first_row = wide_row * ROWS + FIRST if ROWS > 1 else wide_row
    q_at = q_ptr + first_row * row_stride
    if Q > 1:
        q_at += g // G * row_stride
    return q_at + head * head_stride, head, first_row


@triton.jit
def copy_tile(  # type: ignore[no-untyped-def]
    k_tiles, v_tiles, k_scale_tiles, v_scale_tiles, table, key, kv_head, num_kv_heads, n, lens,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Copy a tile that is in one block: keys, values, scales, and which queries see which keys."""
    block = tl.load(table + key // BLOCK_SIZE)
    at = block * BLOCK_SIZE + key % BLOCK_SIZE
    k = k_tiles.load([at, kv_head * (D // 2 if CODES else D)])
    v = v_tiles.load([at, kv_head * (D // 2 if CODES else D)])
    k_scale, v_scale = 0.0, 0.0  # None is no result in Triton 3.6
    if CODES:
        # 32 bits: a cache of 2^31 heads has 2^31 * D bytes.
        scale_at = (block * num_kv_heads + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
        k_scale = k_scale_tiles.load([scale_at])
        v_scale = v_scale_tiles.load([scale_at])
        visible = (key + n)[:, None] >= lens - WINDOW
    else:
        visible = (key + n)[None, :] >= lens - WINDOW
    return k, v, k_scale, v_scale, visible


@triton.jit
def load_tile(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table, key, end_key, shortest, kv_head, num_kv_heads,
    n, w, lens,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    WINDOW: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """As `copy_tile`, any keys before `end_key`, with the columns w."""
    WIDTH: tl.constexpr = D // 2 if CODES else D  # noqa: N806
    at, scale_at = cache_offsets(
        table, key, end_key, kv_head, num_kv_heads, WIDTH, BLOCK_SIZE, BLOCK_N
    )
    inside = key + n < end_key
    if WINDOW:
        inside &= key + n >= shortest - WINDOW
    loaded = inside[:, None] & (w < WIDTH)[None, :]
    k = tl.load(k_ptr + at[:, None] + w[None, :], mask=loaded, other=0)
    v = tl.load(v_ptr + at[:, None] + w[None, :], mask=loaded, other=0)
    k_scale, v_scale = 0.0, 0.0  # None is no result in Triton 3.6
    if CODES:
        k_scale = tl.load(k_scales_ptr + scale_at, mask=inside, other=1.0)
        v_scale = tl.load(v_scales_ptr + scale_at, mask=inside, other=1.0)
        visible = sees(lens, (key + n)[:, None], WINDOW) if ROWS > 1 else inside[:, None]
    else:
        visible = sees(lens, (key + n)[None, :], WINDOW) if ROWS > 1 else inside[None, :]
    return k, v, k_scale, v_scale, visible


@dataclass(slots=True)
class DecodeLaunch:
    """A launch for some queries of each sequence. A kernel's sums come after the operands."""

    operands: tuple[Any, ...]
    sizes: tuple[Any, ...]
    constants: dict[str, Any]
    num_heads: int  # query heads of a sequence, of all its queries, as rows of sums
    block_g: int  # queries of a key head, as a power of two
    block_d: int
    is_narrow: bool  # heads of at most 256 bytes
    is_copied: bool  # tiles are copied


def launches(
    q: torch.Tensor, kv: KVLayer, plan: "DecodePlan | OrderedDecodePlan", out: torch.Tensor
) -> Iterator[DecodeLaunch]:
    """One for each MOST_QUERIES queries of a key head."""
    limit = MOST_QUERIES if kv.k_scales is None else HALF
    most = max(1, limit // (q.shape[1] // kv.k_cache.shape[2]))
    count = cdiv(plan.num_queries, cdiv(plan.num_queries, most))
    for first in range(0, plan.num_queries, count):
        yield _launch(q, kv, plan, out, first, min(count, plan.num_queries - first))


def _launch(
    q: torch.Tensor, kv: KVLayer, plan: "DecodePlan | OrderedDecodePlan", out: torch.Tensor,
    first: int, count: int,
) -> DecodeLaunch:  # fmt: skip
    """For `count` queries of each sequence, from `first` on."""
    _, num_heads, head_dim = q.shape
    quantized = kv.k_scales is not None
    assert not quantized or kv.soft_cap is None
    k_cache, v_cache = (as_pairs(x) if quantized else x for x in (kv.k_cache, kv.v_cache))
    _, block_size, num_kv_heads, width = k_cache.shape  # for codes, the width is half of head_dim
    assert q.stride(2) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous()
    group = num_heads // num_kv_heads
    block_d, block_g = next_power_of_2(head_dim), next_power_of_2(count * group)
    block_n = tile_keys(block_d, q.dtype)
    narrow = block_n == TILE
    copied = (
        plan.copies_tiles and (narrow or (block_d <= MOST_COPIED and not quantized))
        and block_d == head_dim and block_size % TILE == 0 and q.dtype.itemsize == 2
        and block_g <= MOST_QUERIES
    )  # fmt: skip
    tiles = [
        tiles_of(cache.view(-1, num_kv_heads * width), block_n, width) if copied else None
        for cache in (k_cache, v_cache)
    ]
    scales = [None if x is None else x.view(-1) for x in (kv.k_scales, kv.v_scales)]
    scale_tiles = [
        TensorDescriptor(x, [len(x)], [1], [block_n]) if copied and x is not None else None
        for x in scales
    ]
    least, stages = (8, CODES_STAGES) if quantized else (16, 2)
    operands = (
        q, k_cache, v_cache, *scales, *tiles, *scale_tiles, plan.block_tables, plan.context_lens,
        plan.starts, plan.arrivals, kv.sinks, out,
    )  # fmt: skip
    sizes = (
        kv.scale * LOG2E, q.stride(0), q.stride(1), plan.block_tables.stride(0),
        len(q) // plan.num_queries, num_kv_heads,
    )  # fmt: skip
    constants = dict(
        ROWS=plan.num_queries, FIRST=first, Q=count, G=group, D=head_dim, BLOCK_SIZE=block_size,
        BLOCK_G=max(least, block_g), BLOCK_D=block_d, BLOCK_N=block_n, TILE=TILE,
        WINDOW=kv.window or 0, COPIED=copied, CODES=quantized,
        CONVERTED=quantized and converts_codes(q.device), NEXT_FIRST=len(q) <= NEXT_FIRST_ROWS,
        CAP=cap_log2(kv), num_stages=stages, **early(q.device),
    )  # fmt: skip
    return DecodeLaunch(
        operands, sizes, constants, count * num_heads, block_g, block_d, narrow, copied
    )
