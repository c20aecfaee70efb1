"""The state spaces of Mamba 2 for chunks of tokens, with products of matrices.

In a chunk with the state S [P, N] before it, let F be the sums of the logarithms of the factors up
to each token, t its time step, and i, j tokens. Then

    output i = exp(F_i) S C_i + sum over j <= i of exp(F_i - F_j) (C_i B_j) t_j x_j + skip * x_i,
    S after the last token n = exp(F_n) S + sum over j of exp(F_n - F_j) t_j x_j B_j.

The first kernel computes t, F and exp(F_n - F_j) t_j of all heads, and C_i B_j, which the heads of
a group share. The second one goes through the chunks of a sequence, updates S, and keeps S before
each chunk. The third one computes all outputs, each chunk alone.

Sums: those over j go over all tokens of a chunk in one product. To them, the state's part is added,
then the skip; to the state, the chunk's part. The state's part sums BLOCK_N of S's columns at a
time, in their order. Products are as in `products_in`.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.operands.rates import SpaceRates
from nanovllm.kernels.operands.state_chunks import CHUNK
from nanovllm.kernels.operands.state_step import StateStep
from nanovllm.kernels.triton.state.gates import (
    log_forget,
    multiply,
    num_stages,
    products_in,
    softplus,
    value_block,
)  # fmt: skip

HEADS = 16  # whose times a program of the first kernel computes


@triton.jit(do_not_specialize=["num_tokens"])
def _prepare_kernel(  # type: ignore[no-untyped-def]
    xbc_ptr, dt_ptr, log_rate_ptr, bias_ptr, low, high, chunks_ptr, scores_ptr, times_ptr,
    num_tokens, xbc_stride, dt_stride,
    G: tl.constexpr, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One program computes a group's products, or the times of HEADS heads, for one chunk.

    `times` [3, H, T] have t, F and exp(F_n - F_j) t_j.
    """
    chunk_ptr, part = chunks_ptr + tl.program_id(0) * 4, tl.program_id(1)
    first, count = tl.load(chunk_ptr).to(tl.int64), tl.load(chunk_ptr + 1)
    if count == 0:
        return
    token = tl.arange(0, CHUNK)
    row, real = first + token, token < count
    if part < G:
        scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        for start in tl.static_range(0, N, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)[None, :]
            b_at = xbc_ptr + row[:, None] * xbc_stride + H * P + part * N + n
            b = tl.load(b_at, mask=real[:, None] & (n < N), other=0.0).to(DTYPE)
            c = tl.load(b_at + G * N, mask=real[:, None] & (n < N), other=0.0).to(DTYPE)
            scores += multiply(c, tl.trans(b))
        scores_at = scores_ptr + (row[:, None] * G + part) * CHUNK + token[None, :]
        tl.store(scores_at, scores, mask=real[:, None])
    else:
        head = (part - G) * HEADS + tl.arange(0, HEADS)
        inside = real[:, None] & (head < H)[None, :]
        dt_at = dt_ptr + row[:, None] * dt_stride + head[None, :]
        dt = tl.load(dt_at, mask=inside, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + head, mask=head < H, other=0.0)[None, :]
        log_rate = tl.load(log_rate_ptr + head, mask=head < H, other=0.0)[None, :]
        time = tl.minimum(tl.maximum(softplus(dt + bias), low), high)
        logs = tl.cumsum(tl.where(inside, log_forget(time, log_rate), 0.0), axis=0)
        time_at = times_ptr + head[None, :].to(tl.int64) * num_tokens + row[:, None]
        tl.store(time_at, time, mask=inside)
        tl.store(time_at + H * num_tokens, logs, mask=inside)
        until_end = tl.exp(tl.min(logs, axis=0)[None, :] - logs)
        tl.store(time_at + 2 * H * num_tokens, time * until_end, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _walk_kernel(  # type: ignore[no-untyped-def]
    xbc_ptr, times_ptr, states_ptr, before_ptr, after_ptr, parts_ptr, chunks_ptr, befores_ptr,
    num_tokens, xbc_stride, slot_stride,
    G: tl.constexpr, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program goes through a sequence's chunks for BLOCK_P inputs of a head, and BLOCK_N of B.

    Its part of the state stays in registers, transposed, as products of many rows are faster.
    `befores` [chunks, H, N, P] have the states before each chunk, in the type of products.
    """
    blocks_p: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    blocks: tl.constexpr = blocks_p * ((N + BLOCK_N - 1) // BLOCK_N)
    number = tl.program_id(0)
    block, head, part_ptr = number % blocks, number // blocks % H, number // (blocks * H) * 8
    part_ptr += parts_ptr
    begin, end = tl.load(part_ptr + 3), tl.load(part_ptr + 4)
    if begin == end:
        return
    n = block // blocks_p * BLOCK_N + tl.arange(0, BLOCK_N)
    p = block % blocks_p * BLOCK_P + tl.arange(0, BLOCK_P)
    state_at = states_ptr + head * (P * N) + p[None, :] * N + n[:, None]
    keep_at = befores_ptr + head * (P * N) + n[:, None] * P + p[None, :]
    inside = (n < N)[:, None] & (p < P)[None, :]
    slot = tl.load(before_ptr + tl.load(part_ptr))
    state = tl.load(state_at + slot * slot_stride, mask=inside, other=0.0)
    token = tl.arange(0, CHUNK)
    logs_ptr = times_ptr + (H + head).to(tl.int64) * num_tokens
    keep_at += begin.to(tl.int64) * (H * P * N)
    # Where the next chunk is, what it forgets and its slot are read during this one.
    first, count = tl.load(chunks_ptr + begin * 4).to(tl.int64), tl.load(chunks_ptr + begin * 4 + 1)
    logs, slot = tl.load(logs_ptr + first + count - 1), tl.load(after_ptr + first + count - 1)
    for chunk in range(begin, end):
        following = chunks_ptr + tl.minimum(chunk + 1, end - 1) * 4
        next_first, next_count = tl.load(following).to(tl.int64), tl.load(following + 1)
        next_last = next_first + next_count - 1
        next_logs, next_slot = tl.load(logs_ptr + next_last), tl.load(after_ptr + next_last)
        row, real = first + token, token < count
        p_real, n_real = real[:, None] & (p < P)[None, :], real[:, None] & (n < N)[None, :]
        row_ptr = xbc_ptr + row[:, None] * xbc_stride
        x = tl.load(row_ptr + head * P + p[None, :], mask=p_real, other=0.0)
        b_at = row_ptr + H * P + head // (H // G) * N + n[None, :]
        b = tl.load(b_at, mask=n_real, other=0.0).to(befores_ptr.dtype.element_ty)
        factor = tl.load(logs_ptr + H * num_tokens + row, mask=real, other=0.0)
        tl.store(keep_at, state.to(befores_ptr.dtype.element_ty), mask=inside)
        keep_at += H * P * N
        added = (x.to(tl.float32) * factor[:, None]).to(befores_ptr.dtype.element_ty)
        state = state * tl.exp(logs) + multiply(tl.trans(b), added)
        if slot >= 0:
            tl.store(state_at + slot * slot_stride, state, mask=inside)
        first, count, logs, slot = next_first, next_count, next_logs, next_slot


@triton.jit(do_not_specialize=["num_tokens"])
def _output_kernel(  # type: ignore[no-untyped-def]
    xbc_ptr, scores_ptr, times_ptr, skip_ptr, chunks_ptr, befores_ptr, out_ptr,
    num_tokens, xbc_stride,
    G: tl.constexpr, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_P outputs of a head for one chunk."""
    blocks: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    number = tl.program_id(0)
    head, chunk = number // blocks % H, number // (blocks * H)
    first, count = tl.load(chunks_ptr + chunk * 4).to(tl.int64), tl.load(chunks_ptr + chunk * 4 + 1)
    if count == 0:
        return
    token, other = tl.arange(0, CHUNK), tl.arange(0, CHUNK)[None, :]
    row, real = first + token, token < count
    p = number % blocks * BLOCK_P + tl.arange(0, BLOCK_P)[None, :]
    p_real, row_ptr = real[:, None] & (p < P), xbc_ptr + row[:, None] * xbc_stride
    x = tl.load(row_ptr + head * P + p, mask=p_real, other=0.0)
    time_at = times_ptr + head.to(tl.int64) * num_tokens + row
    time = tl.load(time_at, mask=real, other=0.0)
    logs = tl.load(time_at + H * num_tokens, mask=real, other=0.0)
    group = head // (H // G)
    dtype = befores_ptr.dtype.element_ty
    scores_at = scores_ptr + (row[:, None] * G + group) * CHUNK + other
    scores = tl.load(scores_at, mask=real[:, None], other=0.0)
    old = tl.zeros([CHUNK, BLOCK_P], tl.float32)
    for start in tl.static_range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        c_at = row_ptr + H * P + (G + group) * N + n[None, :]
        c = tl.load(c_at, mask=real[:, None] & (n < N)[None, :], other=0.0).to(dtype)
        before_at = befores_ptr + (chunk * H + head).to(tl.int64) * (N * P) + n[:, None] * P + p
        before = tl.load(before_at, mask=(n < N)[:, None] & (p < P), other=0.0)
        old += multiply(c, before)
    is_seen = real[:, None] & (token[:, None] >= other)
    scores *= tl.exp(tl.where(is_seen, logs[:, None] - logs[None, :], 0.0)) * time[None, :]
    # A time multiplies a column, and the input stays exact.
    out = multiply(tl.where(is_seen, scores, 0.0).to(dtype), x.to(dtype))
    out += old * tl.exp(logs)[:, None]
    out += tl.load(skip_ptr + head) * x.to(tl.float32)
    out_at = out_ptr + (row * H + head)[:, None] * P + p
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=p_real)


def compute_chunks(
    xbc: torch.Tensor, dt: torch.Tensor, rates: SpaceRates, states: torch.Tensor, step: StateStep,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Compute the sequences with many tokens: their outputs, and the states that are kept.

    Between the kernels, a chunk of a head has a state of the products' type, a token of a group
    CHUNK numbers, and a token of a head three.
    """
    _, num_heads, head_dim, size = states.shape
    num_tokens, chunks = len(xbc), step.chunks
    dtype = products_in(xbc.dtype)
    groups = (xbc.shape[1] - num_heads * head_dim) // (2 * size)
    scores = xbc.new_empty(num_tokens, groups, CHUNK, dtype=torch.float32)
    times = xbc.new_empty(3, num_heads, num_tokens, dtype=torch.float32)
    befores = xbc.new_empty(chunks.num_long_chunks, num_heads, size, head_dim, dtype=dtype)
    fixed = {"G": groups, "H": num_heads, "P": head_dim, "N": size, "CHUNK": CHUNK}
    whole_p, whole_n = (max(16, next_power_of_2(number)) for number in (head_dim, size))
    block_n = min(128 if dtype == torch.bfloat16 else 64, whole_n)
    _prepare_kernel[(chunks.num_long_chunks, groups + cdiv(num_heads, HEADS))](
        xbc, dt, rates.log_rate, rates.bias, rates.low, rates.high, chunks.chunks, scores, times,
        num_tokens, xbc.stride(0), dt.stride(0), **fixed, HEADS=HEADS, BLOCK_N=block_n,
        DTYPE=tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
    )  # fmt: skip
    walk_p, walk_n = value_block(num_heads, head_dim), min(64, whole_n)
    programs = num_heads * cdiv(head_dim, walk_p) * cdiv(size, walk_n)
    _walk_kernel[(chunks.num_long * programs,)](
        xbc, times, states, step.before, step.after, chunks.long, chunks.chunks, befores,
        num_tokens, xbc.stride(0), states.stride(0), **fixed, BLOCK_P=walk_p, BLOCK_N=walk_n,
        num_stages=num_stages(dtype),
    )  # fmt: skip
    block_p = min(64, whole_p)
    _output_kernel[(chunks.num_long_chunks * num_heads * cdiv(head_dim, block_p),)](
        xbc, scores, times, rates.skip, chunks.chunks, befores, out, num_tokens, xbc.stride(0),
        **fixed, BLOCK_P=block_p, BLOCK_N=block_n,
    )  # fmt: skip
