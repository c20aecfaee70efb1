"""Attention of a decode step to latent rows in one order of sums, as `ordered` describes it.

B sequences, Q queries of each, H heads, W numbers of a row, of which the first V are the value.

It reads rows as `latent_decode`, and divides contexts as `ordered_plan`. A program that begins in
the middle of a sequence stores the sums of each of its chunks. Then a second launch adds them, in
the order of their positions, to the sums of the sequence's first program. Slots of sums are those
of `ordered_merge`, with all parts of a sequence's rows in the place of key heads.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.kernels.triton.attention import ordered
from nanovllm.kernels.triton.attention.latent_decode import MANY_ROWS, MERGED_NUMBERS
from nanovllm.kernels.triton.attention.latent_tiles import LatentTiles, load_queries
from nanovllm.kernels.triton.attention.ordered import CHUNK, UNFUSED, quotient
from nanovllm.kernels.triton.attention.ordered_latents import (
    fold_chunks,
    none_yet,
    ordered_tiles,
    store_outputs,
    store_part,
    warps_for,
)
from nanovllm.kernels.triton.attention.ordered_plan import (
    divide_at_chunks,
    slots_for,
)
from nanovllm.kernels.triton.attention.queries import NONE, longest
from nanovllm.kernels.triton.common import (
    LOG2E,
    TILE,
    await_inputs,
    early,
    let_next_begin,
    num_multiprocessors,
    rows_with_room,
)

SLOTS_BYTES = 128 << 20  # of stored sums, at most
MOST_AT_ONCE = 16  # chunks that a program of the merge reads together


@dataclass(slots=True)
class OrderedLatentPlan:
    """A batch's contexts, and their division among programs; shared by all layers."""

    context_lens: torch.Tensor  # [B * Q], int32; 0 for rows that are not used
    block_tables: torch.Tensor  # [B, blocks], int32
    starts: torch.Tensor  # [P + 1, 5], as in `OrderedDecodePlan`
    begins: torch.Tensor  # [B, 2], int32: a sequence's first tile, its first chunk's program
    num_queries: int  # Q
    slots: int  # chunks that can be stored
    tiles: LatentTiles


def plan_ordered_latents(
    block_size: int,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    num_queries: int = 1,
) -> OrderedLatentPlan:
    """Divide a batch's contexts among programs, on the device; as `plan_latents`."""
    device, rows = context_lens.device, num_queries * heads[0]
    tiles = ordered_tiles(*heads[1:], dtype, device, rows)
    parts = cdiv(rows, tiles.queries)
    programs = max(1, num_multiprocessors(device) // parts)
    size = 4 * parts * tiles.queries * heads[2]
    slots = slots_for(block_tables, block_size, size, SLOTS_BYTES)
    begins = context_lens.new_empty(len(context_lens) // num_queries, 2)
    starts, _ = divide_at_chunks(context_lens, num_queries, programs, 1, slots, begins)
    return OrderedLatentPlan(context_lens, block_tables, starts, begins, num_queries, slots, tiles)


@triton.jit(do_not_specialize=["batch_size", "table_stride"])
def _ordered_latent_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, tables_ptr, lens_ptr, starts_ptr, out_ptr, parts_ptr, sums_ptr, scale_log2,
    q_row_stride, q_head_stride, table_stride, batch_size,
    Q: tl.constexpr, H: tl.constexpr, W: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr,
    REST: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a share of one part's rows: the end of a sequence, whole ones, the start of one."""
    part = tl.program_id(0)
    program = tl.program_id(1)
    await_inputs(EARLY)
    seq = tl.load(starts_ptr + program * 5)
    seq_begin = tl.load(starts_ptr + program * 5 + 1)
    length = tl.load(starts_ptr + program * 5 + 2)
    tile = tl.load(starts_ptr + program * 5 + 3)
    last = tl.load(starts_ptr + (program + 1) * 5 + 3)
    m = tl.arange(0, BLOCK_M)
    r = part * BLOCK_M + m
    while tile < last:
        seq_end = seq_begin + tl.maximum(tl.cdiv(length, TILE), 1)
        stop = tl.minimum(seq_end, last)
        end = tl.minimum((stop - seq_begin) * TILE, length)
        lens = tl.load(lens_ptr + seq * Q + r // H, mask=r < Q * H, other=0)
        shortest = tl.load(lens_ptr + seq * Q)
        row = (seq * Q + r // H).to(tl.int64)
        q, q_rest = load_queries(
            q_ptr + row * q_row_stride + r % H * q_head_stride, lens > 0, W, COLUMNS, REST
        )
        is_middle = tile != seq_begin
        slot = (tl.num_programs(1) + seq_begin * TILE // CHUNK) * tl.num_programs(0) + part
        slot = tl.where(is_middle, slot, -1)
        all_top, all_total, all_acc, all_rest = none_yet(BLOCK_M, V, COLUMNS, REST)
        top, total, acc, rest = none_yet(BLOCK_M, V, COLUMNS, REST)
        table = tables_ptr + seq.to(tl.int64) * table_stride
        begin = (tile - seq_begin) * TILE
        if WINDOW:  # skip tiles before it, maybe all tiles of the sequence in this share
            begin = tl.maximum(begin, (shortest - WINDOW) // BLOCK_N * BLOCK_N)
            whole = begin
            read_from = tl.maximum(shortest - WINDOW, 0)
        else:
            whole = tl.maximum(begin, tl.minimum(end, shortest) // BLOCK_N * BLOCK_N)
            read_from = begin
        for masked in tl.static_range(WINDOW > 0, 2):
            all_top, all_total, all_acc, all_rest, top, total, acc, rest = fold_chunks(
                whole if masked else begin, end if masked else whole, q, q_rest, lens, read_from,
                end, all_top, all_total, all_acc, all_rest, top, total, acc, rest, k_ptr, table, 0,
                W, scale_log2, parts_ptr, sums_ptr, slot, tl.num_programs(0), W, V, COLUMNS, REST,
                BLOCK_SIZE, BLOCK_N, WINDOW, CHUNK, not masked,
            )  # fmt: skip
        if (tile == seq_begin) & (stop == seq_end):
            all_acc = tl.where(lens > 0, all_acc, 0.0)
            if V > COLUMNS:
                all_rest = tl.where(lens > 0, all_rest, 0.0)
            out_at = out_ptr + (row * H + r % H) * V
            store_outputs(out_at, r < Q * H, all_total, all_acc, all_rest, V, COLUMNS, REST)
        elif tile == seq_begin:
            slot = program * tl.num_programs(0) + part
            store_part(
                parts_ptr, sums_ptr, slot, lens > 0, all_top, all_total, all_acc, all_rest, V,
                COLUMNS, REST,
            )  # fmt: skip
        tile = stop
        seq_begin = seq_end
        seq += 1
        length = longest(lens_ptr, seq, seq < batch_size, Q)
    let_next_begin(EARLY)


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    lens_ptr, starts_ptr, begins_ptr, parts_ptr, sums_ptr, out_ptr, num_programs, num_parts,
    Q: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, AT_ONCE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add up BLOCK_R rows of a sequence, if it is divided; AT_ONCE chunks are read together."""
    seq = tl.program_id(0)
    await_inputs(EARLY)
    begin = tl.load(begins_ptr + seq * 2)
    program = tl.load(begins_ptr + seq * 2 + 1)
    second = tl.load(starts_ptr + (program + 1) * 5 + 3)
    length = longest(lens_ptr, seq, True, Q)
    if (second > begin) & (second < begin + tl.cdiv(length, TILE)):
        r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        v = tl.arange(0, BLOCK_V)
        real = r < Q * H
        part = r // BLOCK_M
        at = (program * num_parts + part).to(tl.int64)
        all_top, all_total, all_acc = _load_sums(
            parts_ptr, sums_ptr, at, r % BLOCK_M, v, real, BLOCK_M, V
        )
        chunk = (second - begin) * TILE // CHUNK
        if WINDOW:  # chunks before it are seen by no query, and were not stored
            chunk = tl.maximum(chunk, (tl.load(lens_ptr + seq * Q) - WINDOW) // CHUNK)
        first_slot = num_programs + begin * TILE // CHUNK
        for start in range(chunk, tl.cdiv(length, CHUNK), AT_ONCE):
            read = ()
            for i in tl.static_range(AT_ONCE):
                at = ((first_slot + start + i) * num_parts + part).to(tl.int64)
                there = real & ((start + i) * CHUNK < length)
                one = _load_sums(parts_ptr, sums_ptr, at, r % BLOCK_M, v, there, BLOCK_M, V)
                read += (one,)  # type: ignore[assignment]
            for i in tl.static_range(AT_ONCE):
                top, total, acc = read[i]  # type: ignore[var-annotated]
                all_top, all_total, all_acc, _ = ordered.add_chunk(
                    all_top, all_total, all_acc, 0.0, top, total, acc, 0.0, False
                )
        out_at = out_ptr + (seq.to(tl.int64) * (Q * H) + r)[:, None] * V + v[None, :]
        out = quotient(all_acc, all_total).to(out_ptr.dtype.element_ty)
        tl.store(out_at, out, mask=real[:, None] & (v < V)[None, :])
    let_next_begin(EARLY)


@triton.jit
def _load_sums(  # type: ignore[no-untyped-def]
    parts_ptr, sums_ptr, slot, m, v, real, M: tl.constexpr, V: tl.constexpr
):  # fmt: skip
    """The sums of the rows m of slots; those of no keys for rows that are not `real`."""
    top = tl.load(sums_ptr + slot * (2 * M) + m, mask=real, other=NONE)
    total = tl.load(sums_ptr + slot * (2 * M) + M + m, mask=real, other=0.0)
    at = parts_ptr + (slot * M + m)[:, None] * V + v[None, :]
    return top, total, tl.load(at, mask=real[:, None] & (v < V)[None, :], other=0.0)


def ordered_latent_decode(q: torch.Tensor, kv: KVLayer, plan: OrderedLatentPlan) -> torch.Tensor:
    """Attention of the plan's queries q [B * Q, H, W] to their contexts: [B * Q, H, V].

    As `latent_decode`. It stores float32 sums of each chunk in the middle of a divided sequence.
    """
    num_rows, num_heads, width = q.shape
    block_size, values, tiles = kv.k_cache.shape[1], kv.value_width, plan.tiles
    assert values is not None and kv.k_cache.shape[2:] == (1, width)
    assert q.stride(2) == 1 and kv.k_cache.is_contiguous() and not kv.needs
    rows, batch_size = plan.num_queries * num_heads, num_rows // plan.num_queries
    num_parts, programs = cdiv(rows, tiles.queries), len(plan.starts) - 1
    out = rows_with_room(num_rows, num_heads * values, q).view(num_rows, num_heads, values)
    size = (programs + plan.slots) * num_parts * tiles.queries
    parts = q.new_empty(size, values, dtype=torch.float32)
    sums = q.new_empty(2 * size, dtype=torch.float32)
    launch = UNFUSED | early(q.device)
    _ordered_latent_kernel[(num_parts, programs)](
        q, kv.k_cache, plan.block_tables, plan.context_lens, plan.starts, out, parts, sums,
        kv.scale * LOG2E, q.stride(0), q.stride(1), plan.block_tables.stride(0), batch_size,
        Q=plan.num_queries, H=num_heads, W=width, V=values, COLUMNS=tiles.columns, REST=tiles.rest,
        BLOCK_SIZE=block_size, BLOCK_M=tiles.queries, BLOCK_N=tiles.keys, TILE=TILE,
        WINDOW=kv.window or 0, CHUNK=CHUNK,
        num_warps=warps_for(tiles, values, tiles.queries), **launch,
    )  # fmt: skip
    block_r = 1 if num_rows * num_heads < MANY_ROWS else 4
    block_v = next_power_of_2(values)
    at_once = min(MOST_AT_ONCE, max(1, MERGED_NUMBERS // (block_r * block_v)))
    _merge_kernel[(batch_size, cdiv(rows, block_r))](
        plan.context_lens, plan.starts, plan.begins, parts, sums, out, programs, num_parts,
        Q=plan.num_queries, H=num_heads, V=values, BLOCK_V=block_v, BLOCK_M=tiles.queries,
        BLOCK_R=block_r, AT_ONCE=at_once, TILE=TILE, WINDOW=kv.window or 0, CHUNK=CHUNK, **launch,
    )  # fmt: skip
    return out
