"""Store the parts of a divided row, and add them in order. Shapes are those of `ordered_decode`.

A slot has the sums of Q * G queries: `parts` [Q * G, D], and `sums` with top and total [2, Q * G].
The first part of a row, which begins with its first chunk, has the slot of its program; another
chunk has the slot of its first tile, behind those of the programs.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.attention.ordered import add_chunk, quotient
from nanovllm.kernels.triton.attention.queries import NONE, out_heads

AT_ONCE = tl.constexpr(4)  # parts that are read together


@triton.jit
def slot_of(row_begin, chunk, CHUNK_TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The slot of a row's chunk, behind those of the programs."""
    return tl.num_programs(1) + row_begin // CHUNK_TILES + chunk


@triton.jit
def store_sums(  # type: ignore[no-untyped-def]
    parts_ptr, sums_ptr, slot, top, total, acc, QG: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Store the sums of queries in a slot."""
    g = tl.arange(0, acc.shape[0])
    d = tl.arange(0, acc.shape[1])
    tl.store(sums_ptr + slot * 2 * QG + g, top, mask=g < QG)
    tl.store(sums_ptr + slot * 2 * QG + QG + g, total, mask=g < QG)
    real = (g < QG)[:, None] & (d < D)[None, :]
    tl.store(parts_ptr + (slot * QG + g)[:, None] * D + d[None, :], acc, mask=real)


@triton.jit
def _load_sums(  # type: ignore[no-untyped-def]
    parts_ptr, sums_ptr, slot, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, QG: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    real = (g < QG)[:, None] & (d < D)[None, :]
    sums_at = sums_ptr + slot * 2 * QG + g
    top = tl.load(sums_at, mask=g < QG, other=NONE, cache_modifier=".cg")
    total = tl.load(sums_at + QG, mask=g < QG, other=0.0, cache_modifier=".cg")
    parts_at = parts_ptr + (slot * QG + g)[:, None] * D + d[None, :]
    acc = tl.load(parts_at, mask=real, other=0.0, cache_modifier=".cg")
    return top, total, acc


@triton.jit
def merge_if_last(  # type: ignore[no-untyped-def]
    arrivals_ptr, starts_ptr, parts_ptr, sums_ptr, out_ptr, out_row, row_begin, row_end,
    first_program, done, begin, kv_head, num_kv_heads, Q: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK_TILES: tl.constexpr,
):  # fmt: skip
    """Count `done` chunks of a row as stored; the program of the last ones adds all.

    Chunks before `begin` are seen by no query. The barrier orders all threads' writes before the
    release; the acquire orders the reads after it. The counter is reset to 0 for the next layer.
    """
    num_chunks = tl.cdiv(row_end - row_begin, CHUNK_TILES)
    arrivals_at = arrivals_ptr + first_program * num_kv_heads + kv_head
    tl.debug_barrier()
    if tl.atomic_add(arrivals_at, done, sem="acq_rel") + done == num_chunks:
        BLOCK_G: tl.constexpr = triton.next_power_of_2(Q * G)  # noqa: N806
        slot = first_program * num_kv_heads + kv_head
        all_top, all_total, all_acc = _load_sums(
            parts_ptr, sums_ptr, slot, BLOCK_G, BLOCK_D, Q * G, D
        )
        second = tl.load(starts_ptr + (first_program + 1) * 5 + 3)
        begin = tl.maximum(begin, (second - row_begin) // CHUNK_TILES)
        for chunk in tl.range(begin, num_chunks, loop_unroll_factor=AT_ONCE):
            slot = slot_of(row_begin, chunk, CHUNK_TILES) * num_kv_heads + kv_head
            top, total, acc = _load_sums(parts_ptr, sums_ptr, slot, BLOCK_G, BLOCK_D, Q * G, D)
            all_top, all_total, all_acc, _ = add_chunk(
                all_top, all_total, all_acc, 0.0, top, total, acc, 0.0, False
            )
        g = tl.arange(0, BLOCK_G)
        d = tl.arange(0, BLOCK_D)
        heads = out_heads(g, out_row, num_kv_heads, Q, G)
        out_at = out_ptr + heads[:, None] * D + d[None, :]
        inside = (g < Q * G)[:, None] & (d < D)[None, :]
        out = quotient(all_acc, all_total).to(out_ptr.dtype.element_ty)
        tl.store(out_at, out, mask=inside)
        tl.store(arrivals_at, 0)
