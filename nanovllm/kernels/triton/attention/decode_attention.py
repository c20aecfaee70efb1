"""Attention of a decode step: one or a few queries for each sequence, contexts divided evenly.

B sequences, Q queries of each, H query heads, KVH key heads, G = H / KVH, D head dimension.

Reading K and V takes the time of decode, so a program reads its keys once for all Q * G queries of
a sequence and key head. Several queries of a sequence are its last token and the drafts after it.
Tiles of keys that all queries see need no mask.

`decode_plan` divides the contexts among programs. If several programs share a context, the last one
to finish merges their parts by log-sum-exp. Grid and scratch depend only on shapes, so a CUDA graph
can contain the launch.

A GPU that reads memory at full speed is at its power limit, where more instructions make it slower.
So Hopper's tensor memory accelerator copies whole tiles, each in one block, with far fewer
instructions. A context's last tile is only partly filled; threads load it.

A quantized cache has pairs of codes. A tile of 16-bit pairs is copied, and transposed when it is
read, like a tile of bfloat16. In registers the pairs become two tiles, with the even and with the
odd columns, in less than one instruction for a code. So a tile has two products of half the depth
for scores, and two of half the width for the output.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.kernels.triton.attention.attend_codes import (
    attend_codes,
    halves_of_queries,
    interleave,
    with_room,
)
from nanovllm.kernels.triton.attention.decode_plan import HALF, DecodePlan
from nanovllm.kernels.triton.attention.decode_tiles import (
    copy_tile,
    launches,
    load_tile,
    queries_of,
)
from nanovllm.kernels.triton.attention.merge import merge_if_last
from nanovllm.kernels.triton.attention.queries import (
    NONE,
    lengths,
    load_sinks,
    longest,
    out_heads,
)
from nanovllm.kernels.triton.common import attend, await_inputs, let_next_begin, rows_with_room


@triton.jit(do_not_specialize=["batch_size", "table_stride"])
def _decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, k_tiles, v_tiles, k_scale_tiles,
    v_scale_tiles, tables_ptr, lens_ptr, starts_ptr, arrivals_ptr, sinks_ptr, out_ptr, partial_ptr,
    lse_ptr,
    scale_log2, q_row_stride, q_head_stride, table_stride, batch_size, num_kv_heads,
    ROWS: tl.constexpr, FIRST: tl.constexpr, Q: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TILE: tl.constexpr,
    MERGED: tl.constexpr, UNROLLED: tl.constexpr, WINDOW: tl.constexpr, COPIED: tl.constexpr,
    CODES: tl.constexpr, CONVERTED: tl.constexpr, NEXT_FIRST: tl.constexpr, EARLY: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Compute a share of one key head: the end of a row, whole rows, the start of a row.

    CODES: the cache has pairs of codes, and queries are columns, as in `attend_codes`.
    """
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    row = tl.load(starts_ptr + program * 4)
    row_begin = tl.load(starts_ptr + program * 4 + 1)
    length = tl.load(starts_ptr + program * 4 + 2)
    share = tl.load(starts_ptr + program * 4 + 3)
    await_inputs(EARLY)
    if NEXT_FIRST:
        let_next_begin(EARLY)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    w = tl.arange(0, BLOCK_D // 2 if CODES else BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    real = (g < Q * G)[:, None] & (d < D)[None, :]
    first = program * share
    last = first + share
    tile = first
    while (tile < last) & (row < batch_size):
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
        top = tl.full([BLOCK_G], -float("inf") if ROWS == 1 else NONE, tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        if sinks_ptr is not None:  # the part with the row's first keys has the sink
            sink = load_sinks(sinks_ptr, head, g < Q * G)
            top = tl.where(tile == row_begin, sink, top)
            total += tl.where(tile == row_begin, 1.0, 0.0)
            if CODES:
                top, total = with_room(top, total)
        if CODES:
            q_even, q_odd, factor = halves_of_queries(q_at, asked, D, BLOCK_D, CONVERTED)
            factor *= scale_log2
            even = tl.zeros([BLOCK_D // 2, BLOCK_G], tl.float32)
            odd = even
        else:
            asked_columns = asked[:, None] & (d < D)[None, :]
            q = tl.load(q_at[:, None] + d[None, :], mask=asked_columns, other=0.0)
            acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
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
                    top, total, even, odd = attend_codes(
                        q_even, q_odd, k, v, k_scale, v_scale, factor, visible, top, total,
                        even, odd, WINDOW > 0, CONVERTED,
                    )  # fmt: skip
                else:
                    top, total, acc = attend(
                        q, k, v, visible, scale_log2, top, total, acc, WINDOW > 0, CAP
                    )
            begin_key = whole_end
        for key in tl.range(begin_key, end_key, BLOCK_N, num_stages=1 if COPIED else None):
            k, v, k_scale, v_scale, visible = load_tile(
                k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table, key, end_key, shortest, kv_head,
                num_kv_heads, n, w, lens, D, BLOCK_SIZE, BLOCK_N, ROWS, WINDOW, CODES,
            )  # fmt: skip
            if CODES:
                top, total, even, odd = attend_codes(
                    q_even, q_odd, k, v, k_scale, v_scale, factor, visible, top, total,
                    even, odd, True, CONVERTED,
                )  # fmt: skip
            else:
                top, total, acc = attend(q, k, v, visible, scale_log2, top, total, acc, True, CAP)
        if CODES:
            acc = interleave(even, odd, CONVERTED)
        safe_total = tl.where(total == 0.0, 1.0, total)  # a row without keys gives zeros
        acc = acc / safe_total[:, None]
        if ROWS > 1:
            acc = tl.where(asked[:, None], acc, 0.0)
        out_row = first_row * num_kv_heads * G + kv_head * G
        if (tile == row_begin) & (stop == row_end):
            heads = out_heads(g, out_row, num_kv_heads, Q, G)
            out_at = out_ptr + heads[:, None] * D + d[None, :]
            tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=real)
        else:
            # A share starts in at most one divided row, and ends in at most one other divided row.
            slot = (program * num_kv_heads + kv_head) * 2 + (tile != first).to(tl.int32)
            tl.store(lse_ptr + slot * (Q * G) + g, top + tl.log2(safe_total), mask=g < Q * G)
            tl.store(partial_ptr + (slot * (Q * G) + g)[:, None] * D + d[None, :], acc, mask=real)
            merge_if_last(
                arrivals_ptr, lse_ptr, partial_ptr, out_ptr, out_row, row_begin, row_end, share,
                kv_head, num_kv_heads, Q, G, D, BLOCK_D, MERGED, UNROLLED,
            )  # fmt: skip
        tile = stop
        row_begin = row_end
        row += 1
        length = longest(lens_ptr, row, row < batch_size, ROWS)
    if not NEXT_FIRST:
        let_next_begin(EARLY)


def decode_attention(q: torch.Tensor, kv: KVLayer, plan: DecodePlan) -> torch.Tensor:
    """Attention of the plan's queries q [B * Q, H, D] to their contexts; zeros for length 0.

    Any block size; q may be strided, except in its last dimension. Bytes moved: each sequence's K
    and V once for each MOST_QUERIES of a key head (only the part in the window), and two rows of
    float32 for each program and query. With a window, shares of equal size are unequal work, so
    such layers are less well balanced.
    """
    out = rows_with_room(len(q), q.shape[1] * q.shape[2], q).view(q.shape)
    programs = len(plan.starts)
    for launch in launches(q, kv, plan, out):
        parts = programs * 2 * launch.num_heads
        partial = q.new_empty(parts, q.shape[2], dtype=torch.float32)
        lse = q.new_empty(parts, dtype=torch.float32)
        block_g, narrow, copied = launch.block_g, launch.is_narrow, launch.is_copied
        warps = 2 if (copied and block_g <= HALF) or (narrow and block_g < 16) else 4
        most = 4096 if narrow or copied else 2048
        merged, unrolled = min(16, max(1, most // (block_g * max(128, launch.block_d)))), 1
        if plan.num_queries > 1:  # two parts are in flight, as iterations of the loop
            merged, unrolled = 1, 1 if block_g > HALF else 2
        _decode_kernel[(kv.k_cache.shape[2], programs)](
            *launch.operands, partial, lse, *launch.sizes, **launch.constants,
            MERGED=merged, UNROLLED=unrolled, num_warps=warps,
        )  # fmt: skip
    return out
