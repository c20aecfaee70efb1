"""Causal attention of a prefill step to latent rows, from any position of a context on.

T query tokens, S sequences, H heads, W numbers of a row, of which the first V are the value.

A tile has up to M rows: pairs of a token and a head, all heads of several tokens, or, of more than
M heads, a part of the heads of one token. Keys come from the paged cache if a part of any sequence
was cached before the step, else from the step's own rows.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.kernels.triton.attention.latent_tiles import (
    fold_keys,
    latent_tiles,
    load_queries,
    no_sums,
    store_sums,
)
from nanovllm.kernels.triton.attention.ordered import CHUNK, UNFUSED
from nanovllm.kernels.triton.attention.ordered_latents import (
    fold_chunks,
    none_yet,
    ordered_tiles,
    store_outputs,
    warps_for,
)
from nanovllm.kernels.triton.attention.prefill_plan import TiledPrefillPlan
from nanovllm.kernels.triton.attention.queries import NONE, surplus_row
from nanovllm.kernels.triton.common import LOG2E, rows_with_room


@triton.jit(do_not_specialize=["num_rows", "num_seqs", "table_stride"])
def _latent_prefill_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, tables_ptr, cu_q_ptr, cu_k_ptr, tile_seqs_ptr, tile_ends_ptr,
    out_ptr, scale_log2, q_row_stride, q_head_stride, k_row_stride, table_stride, num_rows,
    num_seqs, num_parts,
    H: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr, W: tl.constexpr, V: tl.constexpr,
    COLUMNS: tl.constexpr, REST: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute HEADS heads of QUERIES tokens. BLOCK_SIZE 0: keys are the step's own rows.

    With a CHUNK, sums have one order. Surplus tiles clear rows of no sequence.
    """
    part = tl.program_id(0) % num_parts
    number = tl.program_id(0) // num_parts
    seq = tl.load(tile_seqs_ptr + number)
    m = tl.arange(0, BLOCK_M)
    head = part * HEADS + m % HEADS
    if seq >= num_seqs:
        first = surplus_row(number, cu_q_ptr, tile_ends_ptr, num_seqs, QUERIES)
        row = (first + m // HEADS).to(tl.int64)
        unused = (row < num_rows) & (m < QUERIES * HEADS) & (head < H)
        v = tl.arange(0, 16)
        at = out_ptr + ((row * H + head) * V)[:, None] + v[None, :]
        for column in range(0, V, 16):
            kept = unused[:, None] & (column + v < V)[None, :]
            tl.store(at + column, tl.zeros([BLOCK_M, 16], out_ptr.dtype.element_ty), mask=kept)
    else:
        # Tiles are counted from a sequence's end, so that those with the most keys start first.
        tile = tl.load(tile_ends_ptr + seq) - 1 - number
        first_row = tl.load(cu_q_ptr + seq)
        num_queries = tl.load(cu_q_ptr + seq + 1) - first_row
        num_keys = tl.load(cu_k_ptr + seq + 1) - tl.load(cu_k_ptr + seq)
        query = tile * QUERIES + m // HEADS
        asked = (query < num_queries) & (m < QUERIES * HEADS) & (head < H)
        row = (first_row + query).to(tl.int64)
        q, q_rest = load_queries(
            q_ptr + row * q_row_stride + head * q_head_stride, asked, W, COLUMNS, REST
        )
        first_position = num_keys - num_queries + tile * QUERIES
        lens = num_keys - num_queries + query + 1
        end = tl.minimum(first_position + QUERIES, num_keys)
        begin = 0
        start = 0
        table = tables_ptr + seq.to(tl.int64) * table_stride
        seen_by_all = (first_position + 1) // BLOCK_N * BLOCK_N
        if WINDOW:  # any tile may be at the edge of some query's window
            begin = tl.maximum(first_position + 1 - WINDOW, 0)
            start = begin // BLOCK_N * BLOCK_N
            seen_by_all = start
        if CHUNK:
            all_top, all_total, all_acc, all_rest = none_yet(BLOCK_M, V, COLUMNS, REST)
            top, total, acc, rest = none_yet(BLOCK_M, V, COLUMNS, REST)
            for masked in tl.static_range(WINDOW > 0, 2):
                all_top, all_total, all_acc, all_rest, top, total, acc, rest = fold_chunks(
                    seen_by_all if masked else start, end if masked else seen_by_all, q, q_rest,
                    lens, begin, end, all_top, all_total, all_acc, all_rest, top, total, acc, rest,
                    k_ptr, table, first_row, k_row_stride, scale_log2, out_ptr, out_ptr, -1, 0, W,
                    V, COLUMNS, REST, BLOCK_SIZE, BLOCK_N, WINDOW, CHUNK, not masked,
                )  # fmt: skip
            out_at = out_ptr + (row * H + head) * V
            store_outputs(out_at, asked, all_total, all_acc, all_rest, V, COLUMNS, REST)
        else:
            top = tl.full([BLOCK_M], NONE, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc, acc_rest = no_sums(BLOCK_M, V, COLUMNS, REST)
            for masked in tl.static_range(WINDOW > 0, 2):
                top, total, acc, acc_rest = fold_keys(
                    seen_by_all if masked else start, end if masked else seen_by_all, q, q_rest,
                    lens, begin, end, top, total, acc, acc_rest, k_ptr, table, first_row,
                    k_row_stride, scale_log2, W, V, COLUMNS, REST, BLOCK_SIZE, BLOCK_N, WINDOW,
                    not masked,
                )  # fmt: skip
            total = tl.where(total == 0.0, 1.0, total)  # padding queries may see no key
            acc = acc / total[None, :]
            if V > COLUMNS:
                acc_rest = acc_rest / total[None, :]
            out_at = out_ptr + (row * H + head) * V
            store_sums(out_at, acc, acc_rest, asked, V, COLUMNS, REST)


def latent_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,  # noqa: ARG001
    kv: KVLayer,
    plan: TiledPrefillPlan,
    one_order: bool = False,
) -> torch.Tensor:
    """Causal attention of q [T, H, W] to rows k [T, 1, W], or to the cache if a part is cached.

    The result is [T, H, V]. v is k. A sequence's queries are its last tokens. Rows after the last
    sequence's are 0, if the plan has more sequences than the step. q and k may be strided, except
    in their last dimension. In `one_order` of sums, as `ordered` describes it, a program holds two
    sums. FLOPs: 2 * (W + V) for each head, query and key that the query sees.
    """
    num_tokens, num_heads, width = q.shape
    values, paged = kv.value_width, plan.block_tables is not None
    assert values is not None and k.shape[1:] == (1, width) and not kv.needs
    assert q.stride(2) == k.stride(2) == 1
    block_size = 0
    if paged:
        assert kv.k_cache.is_contiguous()
        k, block_size = kv.k_cache.view(-1, 1, width), kv.k_cache.shape[1]
    tiles_for = ordered_tiles if one_order else latent_tiles
    tiles = tiles_for(width, values, q.dtype, q.device, num_heads * num_tokens)
    num_parts = cdiv(num_heads, tiles.queries)
    heads = cdiv(num_heads, num_parts)
    queries = max(1, tiles.queries // heads)
    divided = plan.tiles(queries)
    tables = plan.block_tables if plan.block_tables is not None else divided.seqs[None]
    out = rows_with_room(num_tokens, num_heads * values, q).view(num_tokens, num_heads, values)
    block_m = max(16, next_power_of_2(heads * queries))
    launch = UNFUSED if one_order else {}
    _latent_prefill_kernel[(num_parts * len(divided.seqs),)](
        q, k, tables, plan.cu_seqlens_q, plan.cu_seqlens_k, divided.seqs, divided.ends, out,
        kv.scale * LOG2E, q.stride(0), q.stride(1), k.stride(0), tables.stride(0),
        len(q), len(divided.ends), num_parts,
        H=num_heads, HEADS=heads, QUERIES=queries, W=width, V=values, COLUMNS=tiles.columns,
        REST=tiles.rest, BLOCK_SIZE=block_size, BLOCK_M=block_m, BLOCK_N=tiles.keys,
        WINDOW=kv.window or 0, CHUNK=CHUNK if one_order else 0,
        num_warps=warps_for(tiles, values, block_m) if one_order else 4, **launch,
    )  # fmt: skip
    return out
