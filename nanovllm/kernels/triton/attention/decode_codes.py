"""The kernel of a decode step's attention over a quantized cache: pairs of codes, in float16.

Shapes and the division of contexts are those of `decode_attention`. A tile of 16-bit pairs is
copied, and transposed when it is read, like a tile of bfloat16. In registers the pairs become two
tiles, with the even and with the odd columns, in less than one instruction for a code. So a tile
has two products of half the depth for scores, and two of half the width for the output.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.attention.attend_codes import (
    attend_codes,
    halves_of_queries,
    interleave,
)
from nanovllm.kernels.triton.attention.merge import merge_if_last
from nanovllm.kernels.triton.attention.queries import NONE, lengths, longest, out_heads, sees
from nanovllm.kernels.triton.common import await_inputs, cache_offsets, let_next_begin


@triton.jit(do_not_specialize=["batch_size", "table_stride"])
def decode_codes_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, k_tiles, v_tiles, k_scale_tiles,
    v_scale_tiles, tables_ptr, lens_ptr, starts_ptr, arrivals_ptr, out_ptr, partial_ptr, lse_ptr,
    scale_log2, q_row_stride, q_head_stride, table_stride, batch_size, num_kv_heads,
    ROWS: tl.constexpr, FIRST: tl.constexpr, Q: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TILE: tl.constexpr,
    MERGED: tl.constexpr, UNROLLED: tl.constexpr, WINDOW: tl.constexpr, COPIED: tl.constexpr,
    CONVERTED: tl.constexpr, NEXT_FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a share of one key head: the end of a row, whole rows, the start of a row."""
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
    pair = tl.arange(0, BLOCK_D // 2)
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
            lens = lens[None, :]
        head = kv_head * G + (g % G if Q > 1 else g)
        wide_row = row.to(tl.int64)
        first_row = wide_row * ROWS + FIRST if ROWS > 1 else wide_row
        q_at = q_ptr + first_row * q_row_stride + head * q_head_stride
        if Q > 1:
            q_at += g // G * q_row_stride
        q_even, q_odd, factor = halves_of_queries(q_at, asked, D, BLOCK_D, CONVERTED)
        factor *= scale_log2
        top = tl.full([BLOCK_G], -float("inf") if ROWS == 1 else NONE, tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        even = tl.zeros([BLOCK_D // 2, BLOCK_G], tl.float32)
        odd = tl.zeros([BLOCK_D // 2, BLOCK_G], tl.float32)
        table = tables_ptr + wide_row * table_stride
        begin_key = (tile - row_begin) * TILE
        if WINDOW:  # skip tiles before it, maybe all tiles of the row in this share
            begin_key = tl.maximum(begin_key, (shortest - WINDOW) // BLOCK_N * BLOCK_N)
        if COPIED:  # whole tiles only: memory after a context's end may be NaN
            common = tl.minimum(end_key, shortest) if ROWS > 1 else end_key
            whole_end = tl.maximum(begin_key, common // BLOCK_N * BLOCK_N)
            for key in range(begin_key, whole_end, BLOCK_N):
                block = tl.load(table + key // BLOCK_SIZE)
                at = block * BLOCK_SIZE + key % BLOCK_SIZE
                k = k_tiles.load([at, kv_head * (D // 2)])
                v = v_tiles.load([at, kv_head * (D // 2)])
                # 32 bits: a cache of 2^31 heads has 2^31 * D bytes.
                scale_at = (block * num_kv_heads + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
                k_scale = k_scale_tiles.load([scale_at])
                v_scale = v_scale_tiles.load([scale_at])
                visible = (key + n)[:, None] >= lens - WINDOW
                top, total, even, odd = attend_codes(
                    q_even, q_odd, k, v, k_scale, v_scale, factor, visible, top, total,
                    even, odd, WINDOW > 0, CONVERTED,
                )  # fmt: skip
            begin_key = whole_end
        for key in tl.range(begin_key, end_key, BLOCK_N, num_stages=1 if COPIED else None):
            at, scale_at = cache_offsets(
                table, key, end_key, kv_head, num_kv_heads, D // 2, BLOCK_SIZE, BLOCK_N
            )
            inside = key + n < end_key
            if WINDOW:
                inside &= key + n >= shortest - WINDOW
            visible = sees(lens, (key + n)[:, None], WINDOW) if ROWS > 1 else inside[:, None]
            loaded = inside[:, None] & (pair < D // 2)[None, :]
            k = tl.load(k_ptr + at[:, None] + pair[None, :], mask=loaded, other=0)
            v = tl.load(v_ptr + at[:, None] + pair[None, :], mask=loaded, other=0)
            k_scale = tl.load(k_scales_ptr + scale_at, mask=inside, other=1.0)
            v_scale = tl.load(v_scales_ptr + scale_at, mask=inside, other=1.0)
            top, total, even, odd = attend_codes(
                q_even, q_odd, k, v, k_scale, v_scale, factor, visible, top, total,
                even, odd, True, CONVERTED,
            )  # fmt: skip
        safe_total = tl.where(total == 0.0, 1.0, total)  # a row without keys gives zeros
        acc = interleave(even, odd, CONVERTED) / safe_total[:, None]
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
