"""Attention of a decode step to latent rows: one or a few queries for each sequence.

B sequences, Q queries of each, H heads, W numbers of a row, of which the first V are the value. A
sequence has R = Q * H rows, in parts of up to M: a program computes a part, and reads a row of the
cache once for both products. So the cache is read once for each part; several parts of the same
keys run side by side, and find them in the L2 cache.

`plan_latents` divides the contexts evenly among programs. A second launch merges the parts of
divided sequences by log-sum-exp, as their sums are too large for one program: a row of 512 columns
for each head and program. Grid and scratch depend only on shapes, so a CUDA graph can contain them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.kernels.triton.attention.decode_plan import divide
from nanovllm.kernels.triton.attention.latent_tiles import (
    LatentTiles,
    fold_keys,
    latent_tiles,
    load_queries,
    no_sums,
    store_sums,
)
from nanovllm.kernels.triton.attention.queries import NONE, longest
from nanovllm.kernels.triton.common import (
    LOG2E,
    TILE,
    await_inputs,
    early,
    let_next_begin,
    num_multiprocessors,
)

MERGED_NUMBERS = 8192  # of the parts that a program of the merge reads at a time
MANY_ROWS = 2048  # from this many rows on, a program merges several


@dataclass(slots=True)
class LatentPlan:
    """A batch's contexts, and their division among programs; shared by all layers."""

    context_lens: torch.Tensor  # [B * Q], int32; 0 for rows that are not used
    block_tables: torch.Tensor  # [B, blocks], int32
    starts: torch.Tensor  # [P, 4], as in `DecodePlan`
    begins: torch.Tensor  # [B], int32: tiles of the sequences before each one
    num_queries: int  # Q
    tiles: LatentTiles


def plan_latents(
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    num_queries: int = 1,
) -> LatentPlan:
    """Divide a batch's contexts among programs, on the device; as `plan_decode`.

    `heads` are their number, the numbers of a row, and those of its value: H, W and V.
    """
    device, rows = context_lens.device, num_queries * heads[0]
    tiles = latent_tiles(*heads[1:], dtype, device, rows)
    programs = max(1, num_multiprocessors(device) // cdiv(rows, tiles.queries))
    begins = torch.empty_like(context_lens[::num_queries])
    starts, _ = divide(context_lens, num_queries, programs, 1, begins)
    return LatentPlan(context_lens, block_tables, starts, begins, num_queries, tiles)


@triton.jit(do_not_specialize=["batch_size", "table_stride"])
def _latent_decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, tables_ptr, lens_ptr, starts_ptr, out_ptr, partial_ptr,
    lse_ptr, scale_log2, q_row_stride, q_head_stride, table_stride, batch_size,
    Q: tl.constexpr, H: tl.constexpr, W: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr,
    REST: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a share of one part's rows: the end of a sequence, whole ones, the start of one."""
    part = tl.program_id(0)
    program = tl.program_id(1)
    await_inputs(EARLY)
    seq = tl.load(starts_ptr + program * 4)
    seq_begin = tl.load(starts_ptr + program * 4 + 1)
    length = tl.load(starts_ptr + program * 4 + 2)
    share = tl.load(starts_ptr + program * 4 + 3)
    m = tl.arange(0, BLOCK_M)
    r = part * BLOCK_M + m
    first = program * share
    last = first + share
    tile = first
    while (tile < last) & (seq < batch_size):
        seq_end = seq_begin + tl.maximum(tl.cdiv(length, TILE), 1)
        stop = tl.minimum(seq_end, last)
        end = tl.minimum((stop - seq_begin) * TILE, length)
        lens = tl.load(lens_ptr + seq * Q + r // H, mask=r < Q * H, other=0)
        shortest = tl.load(lens_ptr + seq * Q)
        row = (seq * Q + r // H).to(tl.int64)
        q, q_rest = load_queries(
            q_ptr + row * q_row_stride + r % H * q_head_stride, lens > 0, W, COLUMNS, REST
        )
        top = tl.full([BLOCK_M], NONE, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc, acc_rest = no_sums(BLOCK_M, V, COLUMNS, REST)
        table = tables_ptr + seq.to(tl.int64) * table_stride
        begin = (tile - seq_begin) * TILE
        if WINDOW:  # skip tiles before it, maybe all tiles of the sequence in this share
            begin = tl.maximum(begin, (shortest - WINDOW) // BLOCK_N * BLOCK_N)
            whole = begin
            read_from = tl.maximum(shortest - WINDOW, 0)
        else:
            whole = tl.maximum(begin, tl.minimum(end, shortest) // BLOCK_N * BLOCK_N)
            read_from = begin
            top, total, acc, acc_rest = fold_keys(
                begin, whole, q, q_rest, lens, read_from, end, top, total, acc, acc_rest, k_ptr,
                table, 0, W, scale_log2, W, V, COLUMNS, REST, BLOCK_SIZE, BLOCK_N, WINDOW, True,
            )  # fmt: skip
        top, total, acc, acc_rest = fold_keys(
            whole, end, q, q_rest, lens, read_from, end, top, total, acc, acc_rest, k_ptr, table, 0,
            W, scale_log2, W, V, COLUMNS, REST, BLOCK_SIZE, BLOCK_N, WINDOW, False,
        )  # fmt: skip
        safe_total = tl.where(total == 0.0, 1.0, total)
        factor = tl.where(lens > 0, 1.0 / safe_total, 0.0)  # a row without keys gives zeros
        acc *= factor[None, :]
        if V > COLUMNS:
            acc_rest *= factor[None, :]
        if (tile == seq_begin) & (stop == seq_end):
            out_at = out_ptr + (row * H + r % H) * V
            store_sums(out_at, acc, acc_rest, r < Q * H, V, COLUMNS, REST)
        else:
            # A share starts in at most one divided row, and ends in at most one other divided row.
            slot = (program * tl.num_programs(0) + part) * 2 + (tile != first).to(tl.int32)
            at = slot.to(tl.int64) * BLOCK_M + m
            tl.store(lse_ptr + at, top + tl.log2(safe_total))
            store_sums(partial_ptr + at * V, acc, acc_rest, r < Q * H, V, COLUMNS, REST)
        tile = stop
        seq_begin = seq_end
        seq += 1
        length = longest(lens_ptr, seq, seq < batch_size, Q)
    let_next_begin(EARLY)


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    lens_ptr, starts_ptr, begins_ptr, lse_ptr, partial_ptr, out_ptr, num_parts,
    Q: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, MERGED: tl.constexpr, TILE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Merge BLOCK_R rows of a sequence, if it is divided: MERGED parts at a time, in order."""
    seq = tl.program_id(0)
    await_inputs(EARLY)
    begin = tl.load(begins_ptr + seq)
    end = begin + tl.maximum(tl.cdiv(longest(lens_ptr, seq, True, Q), TILE), 1)
    share = tl.load(starts_ptr + 3)
    first = begin // share
    last = (end - 1) // share
    if first < last:
        r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        v = tl.arange(0, BLOCK_V)
        top = tl.full([BLOCK_R], NONE, tl.float32)
        total = tl.zeros([BLOCK_R], tl.float32)
        acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
        for start in range(first, last + 1, MERGED):
            program = start + tl.arange(0, MERGED)
            second = (program == first) & (begin != first * share)
            slot = (program[:, None] * num_parts + r[None, :] // BLOCK_M) * 2
            slot += second.to(tl.int32)[:, None]
            at = slot.to(tl.int64) * BLOCK_M + r[None, :] % BLOCK_M
            real = (program <= last)[:, None] & (r < Q * H)[None, :]
            lse = tl.load(lse_ptr + at, mask=real, other=-float("inf"))
            partial = tl.load(
                partial_ptr + at[:, :, None] * V + v[None, None, :],
                mask=real[:, :, None] & (v < V)[None, None, :], other=0.0,
            )  # fmt: skip
            new_top = tl.maximum(top, tl.max(lse, axis=0))
            weights = tl.exp2(lse - new_top[None, :])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weights, axis=0)
            acc = acc * shrink[:, None] + tl.sum(partial * weights[:, :, None], axis=0)
            top = new_top
        total = tl.where(total == 0.0, 1.0, total)  # rows after the last one
        out_at = out_ptr + (seq.to(tl.int64) * (Q * H) + r)[:, None] * V + v[None, :]
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_at, out, mask=(r < Q * H)[:, None] & (v < V)[None, :])
    let_next_begin(EARLY)


def latent_decode(q: torch.Tensor, kv: KVLayer, plan: LatentPlan) -> torch.Tensor:
    """Attention of the plan's queries q [B * Q, H, W] to their contexts: [B * Q, H, V].

    Rows of length 0 give zeros. Any block size; q may be strided, except in its last dimension.
    Bytes moved: each sequence's rows of the cache once for each part (from the L2 cache for all
    but the first), and for each program and head two rows of float32.
    """
    num_rows, num_heads, width = q.shape
    block_size, values, tiles = kv.k_cache.shape[1], kv.value_width, plan.tiles
    assert values is not None and kv.k_cache.shape[2:] == (1, width)
    assert q.stride(2) == 1 and kv.k_cache.is_contiguous() and not kv.needs
    rows, batch_size = plan.num_queries * num_heads, num_rows // plan.num_queries
    num_parts, keys = cdiv(rows, tiles.queries), tiles.keys
    out = q.new_empty(num_rows, num_heads, values)
    slots = len(plan.starts) * num_parts * 2 * tiles.queries
    partial = q.new_empty(slots, values, dtype=torch.float32)
    lse = q.new_empty(slots, dtype=torch.float32)
    launch = early(q.device)
    _latent_decode_kernel[(num_parts, len(plan.starts))](
        q, kv.k_cache, plan.block_tables, plan.context_lens, plan.starts, out, partial, lse,
        kv.scale * LOG2E,
        q.stride(0), q.stride(1), plan.block_tables.stride(0), batch_size,
        Q=plan.num_queries, H=num_heads, W=width, V=values, COLUMNS=tiles.columns, REST=tiles.rest,
        BLOCK_SIZE=block_size, BLOCK_M=tiles.queries, BLOCK_N=keys, TILE=TILE,
        WINDOW=kv.window or 0, num_warps=4, **launch,
    )  # fmt: skip
    block_r = 1 if num_rows * num_heads < MANY_ROWS else 4
    block_v = next_power_of_2(values)
    _merge_kernel[(batch_size, cdiv(rows, block_r))](
        plan.context_lens, plan.starts, plan.begins, lse, partial, out, num_parts,
        Q=plan.num_queries, H=num_heads, V=values, BLOCK_V=block_v, BLOCK_M=tiles.queries,
        BLOCK_R=block_r, MERGED=max(1, MERGED_NUMBERS // (block_r * block_v)), TILE=TILE, **launch,
    )  # fmt: skip
    return out
