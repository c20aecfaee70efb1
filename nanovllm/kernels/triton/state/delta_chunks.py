"""The gated delta rule for chunks of tokens, with products of matrices.

In a chunk with the memory S before it, let G be the sums of the logarithms of the factors up to
each token, and i, j tokens. Token i adds k_i u_i to the memory, in which

    u_i = beta_i * (v_i - exp(G_i) k_i S - sum over j < i of exp(G_i - G_j) (k_i k_j) u_j).

With A_ij = beta_i exp(G_i - G_j) (k_i k_j) for j < i, and T = (I + A)^-1, this is

    U = T (beta V) - T (beta exp(G) K) S.

The first kernel computes T, both products with it, and the scores exp(G_i - G_j) (q_i k_j) of all
chunks. The second one goes through the chunks of a sequence and updates S.

Sums: those over j go over all tokens of a chunk in one product; the memory's part is added last
to outputs, and to a memory the chunk's part. Products are as in `products_in`, T of bf16 in tf32.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.operands.rates import DeltaRates
from nanovllm.kernels.operands.state_chunks import CHUNK
from nanovllm.kernels.operands.state_step import StateStep
from nanovllm.kernels.plain.gated_delta import EPS
from nanovllm.kernels.triton.common import can_copy_tiles
from nanovllm.kernels.triton.state.gates import (
    learn_rate,
    log_forget,
    multiply,
    products_in,
    softplus,
    value_block,
)  # fmt: skip


@triton.jit
def inverse(a, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(I + a)^-1 for a matrix that has numbers only below its diagonal.

    It inverts blocks of 2, 4, 8, ... on the diagonal. A block's inverse follows from those of its
    halves P, Q and the quarter C below P: that quarter of it is -Q^-1 C P^-1.
    """
    tl.static_assert(CHUNK == 64, "blocks double five times from 2")
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    found = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -a, 0.0))
    for level in tl.static_range(1, 6):
        half = 1 << level
        below = (i // (2 * half) == j // (2 * half)) & (i // half != j // half)
        quarter = tl.where(below, a, 0.0)
        found -= multiply(found, multiply(quarter, found))
    return found


@triton.jit
def inverse_length(x, EPS):  # type: ignore[no-untyped-def]
    """1 / sqrt(the squared length of each row, plus EPS)."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) + EPS)


@triton.jit
def _prepare_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, a_ptr, b_ptr, log_rate_ptr, bias_ptr, most, chunks_ptr, w_ptr, u_ptr, scores_ptr,
    factors_ptr, qkv_stride, a_stride, b_stride, EPS,
    KH: tl.constexpr, H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program computes one head's part of one chunk that does not depend on the memory."""
    number = tl.program_id(0)
    head, chunk_ptr = number % H, chunks_ptr + number // H * 4
    first, count = tl.load(chunk_ptr).to(tl.int64), tl.load(chunk_ptr + 1)
    if count == 0:
        return
    token, other = tl.arange(0, CHUNK), tl.arange(0, CHUNK)[None, :]
    row, real = first + token, token < count
    a = tl.load(a_ptr + row * a_stride + head, mask=real, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_stride + head, mask=real, other=0.0)
    time = softplus(a + tl.load(bias_ptr + head))
    logs = tl.where(real, log_forget(time, tl.load(log_rate_ptr + head)), 0.0)
    logs = tl.cumsum(logs, axis=0)
    learn = tl.where(real, learn_rate(b, most), 0.0)
    k_at, v_at = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_V)[None, :]
    row_ptr, place = qkv_ptr + row[:, None] * qkv_stride, row * H + head
    q_at = row_ptr + head // (H // KH) * DK + k_at
    inside, v_inside = real[:, None] & (k_at < DK), real[:, None] & (v_at < DV)
    dtype = w_ptr.dtype.element_ty
    k = tl.load(q_at + KH * DK, mask=inside, other=0.0).to(dtype)
    q = tl.load(q_at, mask=inside, other=0.0).to(dtype)
    k_unit, q_unit = inverse_length(k, EPS), inverse_length(q, EPS) * (DK**-0.5)
    is_seen, is_before = token[:, None] >= other, token[:, None] > other
    decay = tl.exp(tl.where(is_seen, logs[:, None] - logs[None, :], 0.0)) * k_unit[None, :]
    scores = multiply(q, tl.trans(k)) * decay * q_unit[:, None]
    scores_at = scores_ptr + place[:, None] * CHUNK + other
    tl.store(scores_at, tl.where(is_seen, scores, 0.0).to(dtype), mask=real[:, None])
    products = multiply(k, tl.trans(k)) * decay * (learn * k_unit)[:, None]
    solved = inverse(tl.where(is_before, products, 0.0), CHUNK)
    # The numbers of a token are those of a column: they multiply there, and k and v stay exact.
    # The keys are read again, as there are too few registers to keep them.
    k = tl.load(q_at + KH * DK, mask=inside, other=0.0).to(dtype)
    w = multiply((solved * (learn * k_unit * tl.exp(logs))[None, :]).to(dtype), k)
    tl.store(w_ptr + place[:, None] * DK + k_at, w.to(dtype), mask=inside)
    v = tl.load(row_ptr + 2 * KH * DK + head * DV + v_at, mask=v_inside, other=0.0).to(dtype)
    u = multiply((solved * learn[None, :]).to(dtype), v)
    tl.store(u_ptr + place[:, None] * DV + v_at, u.to(dtype), mask=v_inside)
    # Factors: of a query's product with the memory, of a key's addition to it, and of the memory.
    factors_at = factors_ptr + place * 4
    tl.store(factors_at, q_unit * tl.exp(logs), mask=real)
    tl.store(factors_at + 1, k_unit * tl.exp(tl.min(logs, 0) - logs), mask=real)
    tl.store(factors_at + 2, tl.exp(logs), mask=real)


@triton.jit
def _walk_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, w_ptr, u_ptr, scores_ptr, factors_ptr, states_ptr, before_ptr, after_ptr, parts_ptr,
    chunks_ptr, out_ptr, qkv_stride, slot_stride,
    KH: tl.constexpr, H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program goes through a sequence's chunks for BLOCK_V values of a head.

    Its part of the memory stays in registers.
    """
    blocks: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    number = tl.program_id(0)
    head, part_ptr = number // blocks % H, parts_ptr + number // (blocks * H) * 8
    begin, end = tl.load(part_ptr + 3), tl.load(part_ptr + 4)
    if begin == end:
        return
    k_at = tl.arange(0, BLOCK_K)
    v_at = number % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    memory_at = states_ptr + head * (DK * DV) + k_at[:, None] * DV + v_at[None, :]
    inside = (k_at < DK)[:, None] & (v_at < DV)[None, :]
    slot = tl.load(before_ptr + tl.load(part_ptr))
    memory = tl.load(memory_at + slot * slot_stride, mask=inside, other=0.0)
    token, other = tl.arange(0, CHUNK), tl.arange(0, CHUNK)[None, :]
    dtype = w_ptr.dtype.element_ty
    # Where the next chunk is, how much it forgets and its slot are read during this one.
    first, count = tl.load(chunks_ptr + begin * 4).to(tl.int64), tl.load(chunks_ptr + begin * 4 + 1)
    shrink_ptr, last = factors_ptr + head * 4 + 2, first + count - 1
    shrink, slot = tl.load(shrink_ptr + last * (H * 4)), tl.load(after_ptr + last)
    for chunk in range(begin, end):
        following = chunks_ptr + tl.minimum(chunk + 1, end - 1) * 4
        next_first, next_count = tl.load(following).to(tl.int64), tl.load(following + 1)
        next_last = next_first + next_count - 1
        next_shrink = tl.load(shrink_ptr + next_last * (H * 4))
        next_slot = tl.load(after_ptr + next_last)
        row, real = first + token, token < count
        place = row * H + head
        k_real, v_real = real[:, None] & (k_at < DK)[None, :], real[:, None] & (v_at < DV)[None, :]
        q_at = qkv_ptr + row[:, None] * qkv_stride + head // (H // KH) * DK + k_at[None, :]
        q = tl.load(q_at, mask=k_real, other=0.0).to(dtype)
        k = tl.load(q_at + KH * DK, mask=k_real, other=0.0).to(dtype)
        w = tl.load(w_ptr + place[:, None] * DK + k_at[None, :], mask=k_real, other=0.0)
        u = tl.load(u_ptr + place[:, None] * DV + v_at[None, :], mask=v_real, other=0.0)
        scores_at = scores_ptr + place[:, None] * CHUNK + other
        scores = tl.load(scores_at, mask=real[:, None], other=0.0)
        q_factor = tl.load(factors_ptr + place * 4, mask=real, other=0.0)
        k_factor = tl.load(factors_ptr + place * 4 + 1, mask=real, other=0.0)
        rounded = memory.to(dtype)
        added = u.to(tl.float32) - multiply(w, rounded)
        out = multiply(scores, added.to(dtype))
        out += multiply(q, rounded) * q_factor[:, None]
        out_at = out_ptr + place[:, None] * DV + v_at[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=v_real)
        added = (added * k_factor[:, None]).to(dtype)
        memory = memory * shrink + multiply(tl.trans(k), added)
        if slot >= 0:
            tl.store(memory_at + slot * slot_stride, memory, mask=inside)
        first, count, shrink, slot = next_first, next_count, next_shrink, next_slot


def _num_stages(dtype: torch.dtype, block_k: int, device: torch.device) -> int:
    """The stages of a walk: with three, a chunk is read while another one is computed.

    Their shared memory, 193 KiB for keys of 128, exists on Hopper GPUs.
    """
    if dtype != torch.bfloat16:
        return 1
    return 3 if block_k <= 128 and can_copy_tiles(device) else 2


def compute_chunks(
    qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rates: DeltaRates, states: torch.Tensor,
    step: StateStep, out: torch.Tensor,
) -> None:  # fmt: skip
    """Compute the sequences with many tokens: their outputs, and the states that are kept.

    Between the kernels, a token of a head has Dk + Dv + CHUNK numbers of the products' type, and
    three factors.
    """
    _, num_heads, key_size, value_size = states.shape
    num_tokens, chunks = len(qkv), step.chunks
    dtype = products_in(qkv.dtype)
    w, u, scores = (
        qkv.new_empty(num_tokens, num_heads, size, dtype=dtype)
        for size in (key_size, value_size, CHUNK)
    )
    factors = qkv.new_empty(num_tokens, num_heads, 4, dtype=torch.float32)  # 16 bytes
    block_k = max(16, next_power_of_2(key_size))
    fixed = {
        "KH": (qkv.shape[1] - num_heads * value_size) // (2 * key_size), "H": num_heads,
        "DK": key_size, "DV": value_size, "BLOCK_K": block_k, "CHUNK": CHUNK,
    }  # fmt: skip
    _prepare_kernel[(chunks.num_long_chunks * num_heads,)](
        qkv, a, b, rates.log_rate, rates.bias, rates.most, chunks.chunks, w, u, scores, factors,
        qkv.stride(0), a.stride(0), b.stride(0), EPS,
        **fixed, BLOCK_V=max(16, next_power_of_2(value_size)), num_warps=4,
    )  # fmt: skip
    block_v = value_block(num_heads, value_size)
    _walk_kernel[(chunks.num_long * num_heads * cdiv(value_size, block_v),)](
        qkv, w, u, scores, factors, states, step.before, step.after, chunks.long, chunks.chunks,
        out, qkv.stride(0), states.stride(0),
        **fixed, BLOCK_V=block_v, num_warps=4,
        num_stages=_num_stages(dtype, block_k, qkv.device),
    )  # fmt: skip
