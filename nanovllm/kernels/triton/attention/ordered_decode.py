"""Attention of a decode step in one order of sums, as `ordered` describes it.

B sequences, Q queries of each, H query heads, KVH key heads, G = H / KVH, D head dimension.

It reads keys as `decode_attention`: a program reads them once for all Q * G queries of a sequence
and key head, and copies whole tiles. A program that has a row from its first chunk on adds the
row's chunks in registers. One that begins in the middle of a row stores each of its chunks there;
the last program to finish adds them to the sums of the row's first program.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.kernels.triton.attention.decode_tiles import (
    copy_tile,
    launches,
    load_tile,
    queries_of,
)
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
from nanovllm.kernels.triton.attention.ordered_merge import merge_if_last, slot_of, store_sums
from nanovllm.kernels.triton.attention.ordered_plan import OrderedDecodePlan
from nanovllm.kernels.triton.attention.queries import lengths, longest, out_heads
from nanovllm.kernels.triton.common import await_inputs, let_next_begin, rows_with_room


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    is_middle, all_top, all_total, all_even, all_odd, top, total, even, odd, parts_ptr, sums_ptr,
    row_begin, key, kv_head, num_kv_heads, asked,
    QG: tl.constexpr, D: tl.constexpr, CODES: tl.constexpr, CONVERTED: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add the sums of the chunk with `key` to the row's, or store them in the chunk's slot."""
    if is_middle:
        acc = tl.where(asked[:, None], columns(even, odd, CODES, CONVERTED), 0.0)
        slot = slot_of(row_begin, key // CHUNK, CHUNK // TILE) * num_kv_heads + kv_head
        store_sums(parts_ptr, sums_ptr, slot, top, total, acc, QG, D)
    else:
        all_top, all_total, all_even, all_odd = add_chunk(
            all_top, all_total, all_even, all_odd, top, total, even, odd, CODES
        )
    return all_top, all_total, all_even, all_odd


@triton.jit(do_not_specialize=["batch_size", "table_stride"])
def _ordered_decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, k_tiles, v_tiles, k_scale_tiles,
    v_scale_tiles, tables_ptr, lens_ptr, starts_ptr, arrivals_ptr, sinks_ptr, out_ptr, parts_ptr,
    sums_ptr, scale_log2, q_row_stride, q_head_stride, table_stride, batch_size, num_kv_heads,
    ROWS: tl.constexpr, FIRST: tl.constexpr, Q: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, COPIED: tl.constexpr, CODES: tl.constexpr, CONVERTED: tl.constexpr,
    NEXT_FIRST: tl.constexpr, EARLY: tl.constexpr, CAP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute a share of one key head: the end of a row, whole rows, the start of a row."""
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    row = tl.load(starts_ptr + program * 5)
    row_begin = tl.load(starts_ptr + program * 5 + 1)
    length = tl.load(starts_ptr + program * 5 + 2)
    tile = tl.load(starts_ptr + program * 5 + 3)
    first_program = tl.load(starts_ptr + program * 5 + 4)
    last = tl.load(starts_ptr + (program + 1) * 5 + 3)
    await_inputs(EARLY)
    if NEXT_FIRST:
        let_next_begin(EARLY)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    w = tl.arange(0, BLOCK_D // 2 if CODES else BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    while tile < last:
        row_end = row_begin + tl.maximum(tl.cdiv(length, TILE), 1)
        stop = tl.minimum(row_end, last)
        end_key = tl.minimum((stop - row_begin) * TILE, length)
        lens, shortest = lengths(lens_ptr, row, length, g, ROWS, FIRST, Q, G)
        asked = g < Q * G
        if ROWS > 1:
            asked &= lens > 0
            lens = lens[None, :] if CODES else lens[:, None]
        q_at, head, first_row = queries_of(
            q_ptr, row, kv_head, g, q_row_stride, q_head_stride, ROWS, FIRST, Q, G
        )
        if CODES:
            q_even, q_odd, factor = halves_of_query(q_at, asked, scale_log2, D, BLOCK_D, CONVERTED)
        else:
            real = asked[:, None] & (d < D)[None, :]
            q = tl.load(q_at[:, None] + d[None, :], mask=real, other=0.0)
        is_middle = tile != row_begin
        all_top, all_total, all_even, all_odd = first_sums(
            sinks_ptr, head, g < Q * G, BLOCK_G, BLOCK_D, CODES
        )
        top, total, even, odd = none_yet(BLOCK_G, BLOCK_D, CODES)
        table = tables_ptr + row.to(tl.int64) * table_stride
        begin_key = (tile - row_begin) * TILE
        if WINDOW:  # skip tiles before it, maybe all tiles of the row in this share
            begin_key = tl.maximum(begin_key, (shortest - WINDOW) // BLOCK_N * BLOCK_N)
        if COPIED:  # whole tiles only: memory after a context's end may be NaN
            common = tl.minimum(end_key, shortest) if ROWS > 1 else end_key
            whole_end = tl.maximum(begin_key, common // BLOCK_N * BLOCK_N)
            for key in range(begin_key, whole_end, BLOCK_N):
                k, v, k_scale, v_scale, visible = copy_tile(
                    k_tiles, v_tiles, k_scale_tiles, v_scale_tiles, table, key, kv_head,
                    num_kv_heads, n, lens, D, BLOCK_SIZE, WINDOW, CODES,
                )  # fmt: skip
                if CODES:
                    top, total, even, odd = fold_codes(
                        q_even, q_odd, k, v, k_scale, v_scale, factor, visible, top, total,
                        even, odd, WINDOW > 0, CONVERTED,
                    )  # fmt: skip
                else:
                    top, total, even = fold(
                        q, k, v, visible, scale_log2, top, total, even, WINDOW > 0, CAP
                    )
                if ((key + BLOCK_N) % CHUNK == 0) | (key + BLOCK_N >= end_key):
                    all_top, all_total, all_even, all_odd = _finish(
                        is_middle, all_top, all_total, all_even, all_odd, top, total, even, odd,
                        parts_ptr, sums_ptr, row_begin, key, kv_head, num_kv_heads, asked,
                        Q * G, D, CODES, CONVERTED, CHUNK, TILE,
                    )  # fmt: skip
                    top, total, even, odd = none_yet(BLOCK_G, BLOCK_D, CODES)
            begin_key = whole_end
        for key in tl.range(begin_key, end_key, BLOCK_N, num_stages=1 if COPIED else None):
            k, v, k_scale, v_scale, visible = load_tile(
                k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table, key, end_key, shortest, kv_head,
                num_kv_heads, n, w, lens, D, BLOCK_SIZE, BLOCK_N, ROWS, WINDOW, CODES,
            )  # fmt: skip
            if CODES:
                top, total, even, odd = fold_codes(
                    q_even, q_odd, k, v, k_scale, v_scale, factor, visible, top, total,
                    even, odd, True, CONVERTED,
                )  # fmt: skip
            else:
                top, total, even = fold(q, k, v, visible, scale_log2, top, total, even, True, CAP)
            if ((key + BLOCK_N) % CHUNK == 0) | (key + BLOCK_N >= end_key):
                all_top, all_total, all_even, all_odd = _finish(
                    is_middle, all_top, all_total, all_even, all_odd, top, total, even, odd,
                    parts_ptr, sums_ptr, row_begin, key, kv_head, num_kv_heads, asked,
                    Q * G, D, CODES, CONVERTED, CHUNK, TILE,
                )  # fmt: skip
                top, total, even, odd = none_yet(BLOCK_G, BLOCK_D, CODES)
        acc = columns(all_even, all_odd, CODES, CONVERTED)
        if ROWS > 1:
            acc = tl.where(asked[:, None], acc, 0.0)
        out_row = first_row * num_kv_heads * G + kv_head * G
        if is_middle | (stop < row_end):
            home = program
            if is_middle:
                home = first_program
            else:
                slot = program * num_kv_heads + kv_head
                store_sums(parts_ptr, sums_ptr, slot, all_top, all_total, acc, Q * G, D)
            seen_from = 0
            if WINDOW:
                seen_from = tl.maximum(shortest - WINDOW, 0) // CHUNK
            merge_if_last(
                arrivals_ptr, starts_ptr, parts_ptr, sums_ptr, out_ptr, out_row, row_begin,
                row_end, home, tl.cdiv(stop - tile, CHUNK // TILE), seen_from, kv_head,
                num_kv_heads, Q, G, D, BLOCK_D, CHUNK // TILE,
            )  # fmt: skip
        else:
            heads = out_heads(g, out_row, num_kv_heads, Q, G)
            out_at = out_ptr + heads[:, None] * D + d[None, :]
            out = quotient(acc, all_total).to(out_ptr.dtype.element_ty)
            tl.store(out_at, out, mask=(g < Q * G)[:, None] & (d < D)[None, :])
        tile = stop
        row_begin = row_end
        row += 1
        length = longest(lens_ptr, row, row < batch_size, ROWS)
    if not NEXT_FIRST:
        let_next_begin(EARLY)


def ordered_decode(q: torch.Tensor, kv: KVLayer, plan: OrderedDecodePlan) -> torch.Tensor:
    """Attention of the plan's queries q [B * Q, H, D] to their contexts; zeros for length 0.

    As `decode_attention`. It stores float32 sums of each chunk in the middle of a divided row.
    """
    out = rows_with_room(len(q), q.shape[1] * q.shape[2], q).view(q.shape)
    programs = len(plan.arrivals)
    for launch in launches(q, kv, plan, out):
        rows = (programs + plan.slots) * launch.num_heads
        parts = q.new_empty(rows, q.shape[2], dtype=torch.float32)
        sums = q.new_empty(rows, 2, dtype=torch.float32)
        size = launch.constants["BLOCK_G"] * launch.block_d
        warps = 2 if launch.is_copied and size <= 2048 else 4  # which hold two such sums
        _ordered_decode_kernel[(kv.k_cache.shape[2], programs)](
            *launch.operands, parts, sums, *launch.sizes, **launch.constants, CHUNK=CHUNK,
            num_warps=warps, **UNFUSED,
        )  # fmt: skip
    return out
