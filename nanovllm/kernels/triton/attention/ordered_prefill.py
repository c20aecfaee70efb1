"""Causal attention of a prefill step in one order of sums, as `ordered` describes it.

T query tokens, S sequences, H query heads, KVH key heads, G = H / KVH, D head dimension.

It divides a step as `prefill_attention` does. Codes are always read from the cache, also those of
the step's own tokens, because later steps read them there.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import next_power_of_2
from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.kernels.triton.attention.kv_codes import as_pairs
from nanovllm.kernels.triton.attention.ordered import (
    CHUNK,
    UNFUSED,
    add_chunk,
    columns,
    first_sums,
    fold,
    fold_codes,
    halves_of_query,
    none_yet,
    quotient,
)
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
from nanovllm.kernels.triton.common import (
    LOG2E,
    cap_log2,
    converts_codes,
    rows_with_room,
    tile_keys,
    tiles_of,
)


@triton.jit
def _fold_tiles(  # type: ignore[no-untyped-def]
    start, stop, q, q_odd, factor, position, begin, end, all_top, all_total, all_even, all_odd,
    top, total, even, odd, k_ptr, v_ptr, k_tiles, v_tiles, k_scales_ptr, v_scales_ptr, table_ptr,
    first_row, kv_head, k_row_stride, k_head_stride, v_row_stride, v_head_stride, num_kv_heads,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, COPIED: tl.constexpr, CODES: tl.constexpr, CONVERTED: tl.constexpr,
    CAP: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys [start, stop) of a sequence. MASKED: some query does not see all of them."""
    n = tl.arange(0, BLOCK_N)
    for key in range(start, stop, BLOCK_N):
        k, v, k_scale, v_scale = load_tile(
            k_ptr, v_ptr, k_tiles, v_tiles, k_scales_ptr, v_scales_ptr, table_ptr, key, begin, end,
            first_row, kv_head, k_row_stride, k_head_stride, v_row_stride, v_head_stride,
            num_kv_heads, D, BLOCK_SIZE, BLOCK_D, BLOCK_N, WINDOW, COPIED, CODES, MASKED,
        )  # fmt: skip
        visible = visible_keys(key + n, position, end, WINDOW, CODES)
        if CODES:
            top, total, even, odd = fold_codes(
                q, q_odd, k, v, k_scale, v_scale, factor, visible, top, total, even, odd, MASKED,
                CONVERTED,
            )  # fmt: skip
        else:
            top, total, even = fold(q, k, v, visible, factor, top, total, even, MASKED, CAP)
        if ((key + BLOCK_N) % CHUNK == 0) | (key + BLOCK_N >= end):
            all_top, all_total, all_even, all_odd = add_chunk(
                all_top, all_total, all_even, all_odd, top, total, even, odd, CODES
            )
            top, total, even, odd = none_yet(position.shape[0], BLOCK_D, CODES)
    return all_top, all_total, all_even, all_odd, top, total, even, odd


@triton.jit(do_not_specialize=["num_rows", "num_seqs", "table_stride"])
def _ordered_prefill_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, k_tiles, v_tiles,
    tables_ptr, cu_q_ptr, cu_k_ptr, tile_seqs_ptr, tile_ends_ptr, sinks_ptr, out_ptr, scale_log2,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride,
    table_stride, num_rows, num_seqs, num_kv_heads,
    G: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, COPIED: tl.constexpr, CODES: tl.constexpr, CONVERTED: tl.constexpr,
    CAP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute one tile of queries. BLOCK_SIZE 0: K and V are the step's own, a row for each token.

    CODES: keys and values are codes. Surplus tiles clear rows of no sequence.
    """
    kv_head = tl.program_id(0) % num_kv_heads
    number = tl.program_id(0) // num_kv_heads
    seq = tl.load(tile_seqs_ptr + number)
    M: tl.constexpr = BLOCK_Q * BLOCK_G  # noqa: N806
    m = tl.arange(0, M)
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
        if CODES:
            q, q_odd, factor = halves_of_query(q_at, inside, scale_log2, D, BLOCK_D, CONVERTED)
        else:
            q = tl.load(q_at[:, None] + d[None, :], mask=real, other=0.0)
            q_odd = q
            factor = scale_log2
        all_top, all_total, all_even, all_odd = first_sums(
            sinks_ptr, head, inside, M, BLOCK_D, CODES
        )
        top, total, even, odd = none_yet(M, BLOCK_D, CODES)
        table = tables_ptr + seq.to(tl.int64) * table_stride
        position = num_keys - num_queries + query
        for masked in tl.static_range(2):
            all_top, all_total, all_even, all_odd, top, total, even, odd = _fold_tiles(
                seen_by_all if masked else start, end if masked else seen_by_all, q, q_odd, factor,
                position, begin, end, all_top, all_total, all_even, all_odd, top, total, even, odd,
                k_ptr, v_ptr, k_tiles, v_tiles, k_scales_ptr, v_scales_ptr, table, first_row,
                kv_head, k_row_stride, k_head_stride, v_row_stride, v_head_stride, num_kv_heads, D,
                BLOCK_SIZE, BLOCK_D, BLOCK_N, WINDOW, COPIED, CODES, CONVERTED, CAP, CHUNK,
                masked,
            )  # fmt: skip
        out_at = out_ptr + (row * num_kv_heads * G + head)[:, None] * D + d[None, :]
        out = quotient(columns(all_even, all_odd, CODES, CONVERTED), all_total)
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=real)


def ordered_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv: KVLayer,
    plan: TiledPrefillPlan,
) -> torch.Tensor:
    """Causal attention of q [T, H, D] to k, v [T, KVH, D], or to the cache if the plan has tables.

    As `prefill_attention`. With a cache of codes the plan must have tables, and without a cache
    they are not read.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    paged = plan.block_tables is not None and not kv.is_empty
    quantized = kv.k_scales is not None
    assert paged or not quantized, "codes are read from the cache: a plan needs tables"
    assert kv.soft_cap is None or not quantized
    if paged:
        assert kv.k_cache.is_contiguous() and kv.v_cache.is_contiguous()
        k, v = (cache.flatten(0, 1) for cache in (kv.k_cache, kv.v_cache))
        if quantized:
            k, v = as_pairs(k), as_pairs(v)
    group, block_d = num_heads // num_kv_heads, next_power_of_2(head_dim)
    queries = tile_queries(group, head_dim, q.dtype)
    if quantized:  # sums of twice as many queries do not fit registers
        queries = max(1, queries // 2)
    tiles = plan.tiles(queries)
    tables = plan.block_tables if plan.block_tables is not None else tiles.seqs[None]
    block_n = tile_keys(block_d, q.dtype)
    # With a window, all tiles may be masked, and masked tiles are not copied.
    copied = plan.copies_tiles and kv.window is None and not paged
    copied &= all(map(is_matrix_of_heads, (k, v)))
    k_tiles, v_tiles = (
        tiles_of(x.flatten(1), block_n, head_dim) if copied else None for x in (k, v)
    )
    out = rows_with_room(len(q), num_heads * head_dim, q).view(q.shape)
    _ordered_prefill_kernel[(num_kv_heads * len(tiles.seqs),)](
        q, k, v, kv.k_scales, kv.v_scales, k_tiles, v_tiles, tables, plan.cu_seqlens_q,
        plan.cu_seqlens_k, tiles.seqs, tiles.ends, kv.sinks, out, kv.scale * LOG2E, q.stride(0),
        q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), tables.stride(0),
        len(q), len(tiles.ends), num_kv_heads,
        G=group, D=head_dim, BLOCK_SIZE=kv.k_cache.shape[1] if paged else 0,
        BLOCK_Q=queries, BLOCK_G=next_power_of_2(group), BLOCK_D=block_d,
        BLOCK_N=block_n, WINDOW=kv.window or 0, COPIED=copied,
        CODES=quantized, CONVERTED=quantized and converts_codes(q.device), CAP=cap_log2(kv),
        CHUNK=CHUNK, num_warps=8 if block_d == 256 and q.dtype.itemsize == 2 else 4,
        num_stages=tiles_in_flight(block_n, paged), **UNFUSED,
    )  # fmt: skip
    return out
