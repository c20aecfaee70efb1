"""Causal attention of a prefill step on Hopper GPUs: copies, products and softmax overlap.

A program has three parts that run at the same time. One warp copies tiles of queries, keys and
values with the tensor memory accelerator. Two warpgroups multiply ROWS rows of scores each: queries
times heads that share a key head. A warpgroup issues the scores of its next tile and the product of
this tile's weights and values, computes the softmax of the next tile, and only then waits for the
product. The two take turns to issue, so that products of one run during the softmax of the other.

A program takes one tile of queries after the other, and copies the next tile before the end of this
one. Gluon, the language of layouts and barriers below Triton's, is experimental: the caller checks
its version.

T query tokens, S sequences, H query heads, KVH key heads, G = H / KVH, D head dimension.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanovllm.kernels.integers import next_power_of_2
from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.kernels.triton.attention.hopper_tiles import (
    KEYS,
    MATRIX,
    PART,
    ROWS,
    STAGES,
    copy,
    tile_of,
)
from nanovllm.kernels.triton.attention.prefill_plan import TiledPrefillPlan
from nanovllm.kernels.triton.common import LOG2E, num_multiprocessors

REGISTERS = 168  # of a thread: the most for three warpgroups; 240 in those that multiply
SHORT = 1024  # queries of a sequence: up to this many, a program's start and end cost more

_BARRIER = gl.constexpr(mbarrier.MBarrierLayout())
_STORED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # 16 bytes a thread
_wait_for_warps = getattr(gl, "barrier", None) or gl.thread_barrier  # its name until Triton 3.6


@gluon.jit
def _scores(q, k_memory, stage, nothing):  # type: ignore[no-untyped-def]
    """Issue the computation of scores. `nothing` [ROWS, KEYS] has the layout of the result."""
    k = k_memory.index(stage).permute((1, 0))
    return warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)


@gluon.jit
def _softmax(  # type: ignore[no-untyped-def]
    scores, top, total, scale_log2, position, key,
    MASKED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """One tile of online softmax: its weights, and the factor by which earlier sums shrink."""
    if MASKED:
        n = gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout))
        scores = gl.where((key + n)[None, :] <= position[:, None], scores, -float("inf"))
    new_top = gl.maximum(top, gl.max(scores, axis=1))
    scaled = new_top * scale_log2
    weights = gl.exp2(scores * scale_log2 - scaled[:, None])
    shrink = gl.exp2(top * scale_log2 - scaled)
    return weights, new_top, total * shrink + gl.sum(weights, axis=1), shrink


@gluon.jit
def _clear_after(v, num_rows):  # type: ignore[no-untyped-def]
    """Clear the values after a sequence's end: their weights are 0, but 0 * NaN is NaN."""
    for i in gl.static_range(KEYS // 16):
        some = v.slice(i * 16, 16, dim=0)
        n = i * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, _STORED))
        x = some.load(_STORED)
        some.store(gl.where((n < num_rows)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()  # `wgmma` reads what was stored
    _wait_for_warps()


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    W: gl.constexpr, inputs, G: gl.constexpr, HEADS: gl.constexpr, BLOCK_Q: gl.constexpr,
    D: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: it computes BLOCK_Q queries of HEADS heads, or half of the queries if G is 1."""
    memory, full, empty, turns, steps, ends, scale_log2, total_tiles, num_kv_heads = inputs
    sinks_ptr, out_ptr = ends
    q_memory, k_memory, v_memory = memory
    q_full, k_full, v_full = full
    q_empty, k_empty, v_empty = empty
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    other_heads: gl.constexpr = BLOCK_Q * HEADS == ROWS
    query_at: gl.constexpr = 0 if other_heads else W * ROWS // HEADS
    head_at: gl.constexpr = W * HEADS if other_heads else 0
    nothing = gl.zeros([ROWS, KEYS], gl.float32, layout=scores_layout)
    m = gl.arange(0, ROWS, layout=rows)
    count = 0
    done = 0
    turn = 0
    for number in range(gl.program_id(0), total_tiles, gl.num_programs(0)):
        _seq, kv_head, first_row, query, num_queries, num_keys, first_position, num_tiles = tile_of(
            number, steps, num_kv_heads, BLOCK_Q
        )
        seen_by_all = (first_position + 1) // KEYS
        position = first_position + query_at + m // HEADS
        top = gl.full([ROWS], -float("inf"), gl.float32, layout=rows)
        total = gl.zeros([ROWS], gl.float32, layout=rows)
        if SINKS:  # the sums begin with them, and scores have no factor yet
            of_head = head_at + m % HEADS
            at = sinks_ptr + kv_head * G + of_head
            sinks = gl.load(at, mask=of_head < G, other=0.0)
            top = sinks * (1.4426950408889634 / scale_log2)  # log2(e)
            total += 1.0
        acc = gl.zeros([ROWS, D], gl.float32, layout=acc_layout)

        mbarrier.wait(q_full.index(W), done)
        q = q_memory.index(W)._reinterpret(q_memory.dtype, [ROWS, D], MATRIX)
        stage = count % STAGES
        phase = count // STAGES & 1
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.wait(turns.index(W), turn)
        scores = _scores(q, k_memory, stage, nothing)
        mbarrier.arrive(turns.index(1 - W), count=1)
        turn ^= 1
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        weights, top, total, shrink = _softmax(
            scores, top, total, scale_log2, position, 0, True, scores_layout
        )
        p = gl.convert_layout(weights.to(q_memory.dtype), weights_layout)
        mbarrier.wait(v_full.index(stage), phase)

        for masked in gl.static_range(2):
            for i in range(
                gl.maximum(seen_by_all, 1) if masked else 1, num_tiles if masked else seen_by_all
            ):
                v_stage = count % STAGES
                count += 1
                stage = count % STAGES
                phase = count // STAGES & 1
                mbarrier.wait(k_full.index(stage), phase)
                mbarrier.wait(turns.index(W), turn)
                scores = _scores(q, k_memory, stage, nothing)
                acc = acc * gl.convert_layout(shrink, acc_rows)[:, None]
                acc = warpgroup_mma(p, v_memory.index(v_stage), acc, is_async=True)
                mbarrier.arrive(turns.index(1 - W), count=1)
                turn ^= 1
                scores = warpgroup_mma_wait(1, deps=[scores])
                mbarrier.arrive(k_empty.index(stage), count=1)
                weights, top, total, shrink = _softmax(
                    scores, top, total, scale_log2, position, i * KEYS, masked == 1, scores_layout
                )
                # The wait for values is between softmax and product, so that the assembler
                # does not move the wait for the product before the softmax.
                mbarrier.wait(v_full.index(stage), phase)
                next_p = gl.convert_layout(weights.to(q_memory.dtype), weights_layout)
                acc, p, next_p, top, total, shrink = warpgroup_mma_wait(
                    0, deps=[acc, p, next_p, top, total, shrink]
                )
                p = next_p
                mbarrier.arrive(v_empty.index(v_stage), count=1)
        mbarrier.arrive(q_empty.index(W), count=1)
        done ^= 1

        stage = count % STAGES
        acc = acc * gl.convert_layout(shrink, acc_rows)[:, None]
        if num_tiles * KEYS > num_keys:
            _clear_after(v_memory.index(stage), num_keys - (num_tiles - 1) * KEYS)
        acc = warpgroup_mma(p, v_memory.index(stage), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(v_empty.index(stage), count=1)
        count += 1

        acc = acc * (1.0 / gl.convert_layout(total, acc_rows))[:, None]
        out = gl.convert_layout(acc.to(q_memory.dtype), _STORED)
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, _STORED))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, _STORED))
        query += query_at + row // HEADS
        head = head_at + row % HEADS
        at = (first_row + query).to(gl.int64) * num_kv_heads * G + kv_head * G + head
        real = (query < num_queries) & (head < G)
        gl.store(out_ptr + at[:, None] * D + d[None, :], out, mask=real[:, None])


@gluon.jit
def _barriers(number: gl.constexpr, arrivals: gl.constexpr):  # type: ignore[no-untyped-def]
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], _BARRIER)
    for i in gl.static_range(number):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit(do_not_specialize=["num_seqs", "table_stride"])
def _hopper_prefill_kernel(  # type: ignore[no-untyped-def]
    q_tiles, k_tiles, v_tiles, tables_ptr, cu_q_ptr, cu_k_ptr, tile_seqs_ptr, tile_ends_ptr,
    sinks_ptr, out_ptr, scale_log2, table_stride, num_seqs, num_kv_heads,
    G: gl.constexpr, HEADS: gl.constexpr, BLOCK_Q: gl.constexpr, D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """All tiles of queries."""
    dtype: gl.constexpr = q_tiles.dtype
    memory = (
        gl.allocate_shared_memory(dtype, [2, ROWS // HEADS, HEADS, D], q_tiles.layout),
        gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], MATRIX),
        gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], MATRIX),
    )
    full = (_barriers(2, 1), _barriers(STAGES, 1), _barriers(STAGES, 1))
    empty = (_barriers(2, 1), _barriers(STAGES, 2), _barriers(STAGES, 2))
    turns = _barriers(2, 1)
    mbarrier.arrive(turns.index(0), count=1)
    steps = (cu_q_ptr, cu_k_ptr, tile_seqs_ptr, tile_ends_ptr)
    total = gl.load(tile_ends_ptr + num_seqs - 1) * num_kv_heads
    ends = (sinks_ptr, out_ptr)
    multiply = (memory, full, empty, turns, steps, ends, scale_log2, total, num_kv_heads)
    tiles = (q_tiles, k_tiles, v_tiles)
    copied = (tiles, memory, full, empty, steps, tables_ptr, table_stride, total, num_kv_heads)
    gl.warp_specialize(
        [
            (_multiply, (0, multiply, G, HEADS, BLOCK_Q, D, SINKS)),
            (_multiply, (1, multiply, G, HEADS, BLOCK_Q, D, SINKS)),
            (copy, (copied, G, HEADS, BLOCK_Q, D, BLOCK_SIZE)),
        ],
        [4, 1],
        [240, 24],
    )


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KVLayer, paged: bool) -> bool:
    """Whether the kernel can compute this layer: it has a common shape and a 16-bit type."""
    _, num_heads, head_dim = q.shape
    whole_blocks = kv.k_scales is None and kv.k_cache.shape[1] % PART.value == 0 if paged else True
    return (
        q.dtype.itemsize == 2
        and head_dim in (64, 128)
        and num_heads // k.shape[1] <= 16
        and kv.window is None
        and kv.soft_cap is None
        and whole_blocks
        and all(map(_can_be_copied, (q,) if paged else (q, k, v)))
    )


def _can_be_copied(x: torch.Tensor) -> bool:
    """Whether heads of x [T, H, D] are contiguous, and rows begin at multiples of 16 bytes."""
    contiguous = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return contiguous and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def hopper_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KVLayer, plan: TiledPrefillPlan
) -> torch.Tensor:
    """Causal attention of q [T, H, D] to k, v [T, KVH, D], or to the cache: as `prefill_attention`.

    The layer must fit (`fits`).
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    # The two warpgroups have the same queries of different heads, or different queries of one head.
    block_g = next_power_of_2(group)
    heads, block_q = max(1, block_g // 2), 2 * ROWS.value // block_g
    tiles = plan.tiles(block_q)
    paged = plan.block_tables is not None
    if paged:
        k, v = (cache.flatten(0, 1) for cache in (kv.k_cache, kv.v_cache))
    tables = plan.block_tables if plan.block_tables is not None else tiles.seqs[None]
    box = [PART.value, PART.value] if paged else [KEYS.value, head_dim]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    programs = num_kv_heads * len(tiles.seqs)
    if num_tokens <= SHORT * len(tiles.ends):
        programs = min(programs, num_multiprocessors(q.device))
    _hopper_prefill_kernel[(programs,)](
        _described(q, [ROWS.value // heads, heads, head_dim]), _described(k.flatten(1), box),
        _described(v.flatten(1), box), tables, plan.cu_seqlens_q, plan.cu_seqlens_k, tiles.seqs,
        tiles.ends, out if kv.sinks is None else kv.sinks, out, kv.scale * LOG2E,
        tables.stride(0), len(tiles.ends), num_kv_heads,
        G=group, HEADS=heads, BLOCK_Q=block_q, D=head_dim,
        BLOCK_SIZE=kv.k_cache.shape[1] if paged else 0, SINKS=kv.sinks is not None,
        num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip
    return out


def _described(x: torch.Tensor, box: list[int]) -> TensorDescriptor:
    """Describe a tensor to the accelerator, which copies boxes of it."""
    layout = gl.NVMMASharedLayout(128, 16, len(box))
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)
