"""Causal attention of a prefill step, with queries that start at any position of a context.

T query tokens, S sequences, H query heads, KVH key heads, G = H / KVH, D head dimension.

A program takes a tile of one sequence's queries, for all G query heads of one key head, so that
keys are read once for the group. Keys come from the paged cache if a part of any sequence was
cached before the step, else from the step's own K and V.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import next_power_of_2
from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.kernels.triton.attention.attend_codes import (
    attend_codes,
    halves_of_queries,
    interleave,
    with_room,
)
from nanovllm.kernels.triton.attention.kv_codes import as_pairs
from nanovllm.kernels.triton.attention.prefill_plan import TiledPrefillPlan
from nanovllm.kernels.triton.attention.prefill_tiles import (
    clear_surplus,
    is_matrix_of_heads,
    keys_of,
    load_tile,
    queries_of,
    tile_queries,
    tiles_in_flight,
    visible_keys,
)
from nanovllm.kernels.triton.attention.queries import load_sinks
from nanovllm.kernels.triton.common import (
    LOG2E,
    attend,
    cap_log2,
    converts_codes,
    tile_keys,
    tiles_of,
)


@triton.jit
def _fold_tiles(  # type: ignore[no-untyped-def]
    start, stop, q, position, begin, end, top, total, acc, k_ptr, v_ptr, k_tiles, v_tiles,
    table_ptr, first_row, kv_head, k_row_stride, k_head_stride, v_row_stride, v_head_stride,
    num_kv_heads, scale_log2,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, COPIED: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys [start, stop) of a sequence. MASKED: some query does not see all of them."""
    n = tl.arange(0, BLOCK_N)
    for key in range(start, stop, BLOCK_N):
        k, v, _, _ = load_tile(
            k_ptr, v_ptr, k_tiles, v_tiles, None, None, table_ptr, key, begin, end, first_row,
            kv_head, k_row_stride, k_head_stride, v_row_stride, v_head_stride, num_kv_heads, D,
            BLOCK_SIZE, BLOCK_D, BLOCK_N, WINDOW, COPIED, False, MASKED,
        )  # fmt: skip
        visible = visible_keys(key + n, position, end, WINDOW, False)
        top, total, acc = attend(q, k, v, visible, scale_log2, top, total, acc, MASKED, CAP)
    return top, total, acc


@triton.jit
def _fold_codes(  # type: ignore[no-untyped-def]
    start, stop, q_even, q_odd, factor, position, begin, end, top, total, even, odd, k_ptr, v_ptr,
    k_scales_ptr, v_scales_ptr, table_ptr, kv_head, num_kv_heads,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CONVERTED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """As `_fold_tiles`, with pairs of codes from the cache."""
    n = tl.arange(0, BLOCK_N)
    for key in range(start, stop, BLOCK_N):
        k, v, k_scale, v_scale = load_tile(
            k_ptr, v_ptr, None, None, k_scales_ptr, v_scales_ptr, table_ptr, key, begin, end, 0,
            kv_head, 0, 0, 0, 0, num_kv_heads, D, BLOCK_SIZE, BLOCK_D, BLOCK_N, WINDOW, False,
            True, True,
        )  # fmt: skip
        visible = visible_keys(key + n, position, end, WINDOW, True)
        top, total, even, odd = attend_codes(
            q_even, q_odd, k, v, k_scale, v_scale, factor, visible, top, total, even, odd, MASKED,
            CONVERTED,
        )  # fmt: skip
    return top, total, even, odd


@triton.jit
def _attend_tiles(  # type: ignore[no-untyped-def]
    q, position, begin, start, seen_by_all, end, top, total, k_ptr, v_ptr, k_tiles, v_tiles,
    table_ptr, first_row, kv_head, k_row_stride, k_head_stride, v_row_stride, v_head_stride,
    num_kv_heads, scale_log2,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, COPIED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The sums of a tile of queries [M, BLOCK_D] over all keys that some query sees.

    They begin with the largest scores `top` and the sums of weights `total`.
    """
    acc = tl.zeros([q.shape[0], BLOCK_D], tl.float32)
    for masked in tl.static_range(2):
        top, total, acc = _fold_tiles(
            seen_by_all if masked else start, end if masked else seen_by_all, q, position, begin,
            end, top, total, acc, k_ptr, v_ptr, k_tiles, v_tiles, table_ptr, first_row, kv_head,
            k_row_stride, k_head_stride, v_row_stride, v_head_stride, num_kv_heads, scale_log2, D,
            BLOCK_SIZE, BLOCK_D, BLOCK_N, WINDOW, COPIED, CAP, masked,
        )  # fmt: skip
    return total, acc


@triton.jit
def _attend_pairs(  # type: ignore[no-untyped-def]
    q_at, inside, position, begin, start, seen_by_all, end, top, total, k_ptr, v_ptr, k_scales_ptr,
    v_scales_ptr, table_ptr, kv_head, num_kv_heads, scale_log2,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CONVERTED: tl.constexpr,
):  # fmt: skip
    """As `_attend_tiles`, with pairs of codes from the cache, for queries at `q_at` [M]."""
    q_even, q_odd, factor = halves_of_queries(q_at, inside, D, BLOCK_D, CONVERTED)
    factor *= scale_log2
    even = tl.zeros([BLOCK_D // 2, q_at.shape[0]], tl.float32)
    odd = even
    for masked in tl.static_range(2):
        top, total, even, odd = _fold_codes(
            seen_by_all if masked else start, end if masked else seen_by_all, q_even, q_odd, factor,
            position, begin, end, top, total, even, odd, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr,
            table_ptr, kv_head, num_kv_heads, D, BLOCK_SIZE, BLOCK_D, BLOCK_N, WINDOW, CONVERTED,
            masked,
        )  # fmt: skip
    return total, interleave(even, odd, CONVERTED)


@triton.jit(do_not_specialize=["num_rows", "num_seqs", "table_stride"])
def _prefill_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k_codes_ptr, v_codes_ptr, k_scales_ptr, v_scales_ptr, k_tiles, v_tiles,
    tables_ptr, cu_q_ptr, cu_k_ptr, tile_seqs_ptr, tile_ends_ptr, sinks_ptr, out_ptr, scale_log2,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride,
    table_stride, num_rows, num_seqs, num_kv_heads,
    G: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, COPIED: tl.constexpr, QUANTIZED: tl.constexpr, CONVERTED: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Compute one tile of queries. BLOCK_SIZE 0: K and V are the step's own, a row for each token.

    QUANTIZED: keys and values of the cache are codes. Surplus tiles clear rows of no sequence.
    """
    kv_head = tl.program_id(0) % num_kv_heads
    number = tl.program_id(0) // num_kv_heads
    seq = tl.load(tile_seqs_ptr + number)
    m = tl.arange(0, BLOCK_Q * BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * G + m % BLOCK_G
    if seq >= num_seqs:
        clear_surplus(
            out_ptr, number, head, m, cu_q_ptr, tile_ends_ptr, num_rows, num_seqs, num_kv_heads,
            G, D, BLOCK_Q, BLOCK_G, BLOCK_D,
        )  # fmt: skip
    else:
        query, inside, row, first_row, num_queries, num_keys, first_position = queries_of(
            number, seq, m, cu_q_ptr, cu_k_ptr, tile_ends_ptr, G, BLOCK_Q, BLOCK_G
        )
        real = inside[:, None] & (d < D)[None, :]
        q_at = q_ptr + row * q_row_stride + head * q_head_stride
        begin, end, start, seen_by_all = keys_of(first_position, num_keys, BLOCK_Q, BLOCK_N, WINDOW)
        top = tl.full([BLOCK_Q * BLOCK_G], -float("inf"), tl.float32)
        if WINDOW:
            top = tl.full([BLOCK_Q * BLOCK_G], -1e30, tl.float32)  # the first tile may be hidden
        total = tl.zeros([BLOCK_Q * BLOCK_G], tl.float32)
        if sinks_ptr is not None:
            top = load_sinks(sinks_ptr, head, inside)
            total += 1.0
        table = tables_ptr + seq.to(tl.int64) * table_stride
        position = num_keys - num_queries + query
        cached = num_keys > num_queries
        if QUANTIZED and cached:
            if sinks_ptr is not None:
                top, total = with_room(top, total)
            total, acc = _attend_pairs(
                q_at, inside, position, begin, start, seen_by_all, end, top, total, k_codes_ptr,
                v_codes_ptr, k_scales_ptr, v_scales_ptr, table, kv_head, num_kv_heads, scale_log2,
                D, BLOCK_SIZE, BLOCK_D, BLOCK_N, WINDOW, CONVERTED,
            )  # fmt: skip
        else:
            q = tl.load(q_at[:, None] + d[None, :], mask=real, other=0.0)
            total, acc = _attend_tiles(
                q, position, begin, start, seen_by_all, end, top, total, k_ptr, v_ptr, k_tiles,
                v_tiles, table, first_row, kv_head, k_row_stride, k_head_stride, v_row_stride,
                v_head_stride, num_kv_heads, scale_log2, D, 0 if QUANTIZED else BLOCK_SIZE, BLOCK_D,
                BLOCK_N, WINDOW, COPIED, CAP,
            )  # fmt: skip
        if WINDOW:
            total = tl.where(total == 0.0, 1.0, total)  # padding queries may see no key
        out_at = out_ptr + (row * num_kv_heads * G + head)[:, None] * D + d[None, :]
        tl.store(out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=real)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv: KVLayer,
    plan: TiledPrefillPlan,
) -> torch.Tensor:
    """Causal attention of q [T, H, D] to k, v [T, KVH, D], or to the cache if a part is cached.

    A sequence's queries are its last tokens. Rows after the last sequence's are 0, if the plan has
    more sequences than the step. q, k and v may be strided, except in their last
    dimension. FLOPs: 4 * D for each head, query and key that the query sees.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    paged = plan.block_tables is not None
    if plan.overlaps:
        from nanovllm.kernels.triton.attention import hopper_prefill as hopper

        if hopper.fits(q, k, v, kv, paged):
            return hopper.hopper_prefill(q, k, v, kv, plan)
    quantized = paged and kv.k_scales is not None
    assert kv.soft_cap is None or not quantized
    codes = (k, v)
    if paged:
        assert kv.k_cache.is_contiguous() and kv.v_cache.is_contiguous()
        if quantized:
            codes = (as_pairs(kv.k_cache), as_pairs(kv.v_cache))
        else:
            k, v = (cache.flatten(0, 1) for cache in (kv.k_cache, kv.v_cache))
    group, block_d = num_heads // num_kv_heads, next_power_of_2(head_dim)
    queries = tile_queries(group, head_dim, q.dtype)
    tiles = plan.tiles(queries)
    tables = plan.block_tables if plan.block_tables is not None else tiles.seqs[None]
    block_n = tile_keys(block_d, q.dtype)
    # With a window, all tiles may be masked, and masked tiles are not copied.
    copied = plan.copies_tiles and kv.window is None and all(map(is_matrix_of_heads, (k, v)))
    copied &= quantized or not paged  # copying gains less if a table must be read for each tile
    k_tiles, v_tiles = (
        tiles_of(x.flatten(1), block_n, head_dim) if copied else None for x in (k, v)
    )
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _prefill_kernel[(num_kv_heads * len(tiles.seqs),)](
        q, k, v, *codes, kv.k_scales, kv.v_scales, k_tiles, v_tiles, tables, plan.cu_seqlens_q,
        plan.cu_seqlens_k, tiles.seqs, tiles.ends, kv.sinks, out, kv.scale * LOG2E, q.stride(0),
        q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), tables.stride(0),
        len(q), len(tiles.ends), num_kv_heads,
        G=group, D=head_dim, BLOCK_SIZE=kv.k_cache.shape[1] if paged else 0,
        BLOCK_Q=queries, BLOCK_G=next_power_of_2(group), BLOCK_D=block_d,
        BLOCK_N=block_n, WINDOW=kv.window or 0, COPIED=copied,
        QUANTIZED=quantized, CONVERTED=converts_codes(q.device), CAP=cap_log2(kv),
        num_warps=4, num_stages=tiles_in_flight(block_n, paged),
    )  # fmt: skip
    return out
