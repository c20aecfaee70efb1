"""The gated delta rule. KH heads of keys [Dk], H heads of values [Dv], memories [Dk, Dv]."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.operands.rates import ChannelRates, DeltaRates
from nanovllm.kernels.operands.state_step import StateStep
from nanovllm.kernels.plain.gated_delta import EPS
from nanovllm.kernels.triton.common import await_inputs, early, let_next_begin
from nanovllm.kernels.triton.state.delta_chunks import compute_chunks
from nanovllm.kernels.triton.state.gates import (
    computes_chunks,
    learn_rate,
    log_forget,
    softplus,
    tokens_of,
    value_block,
)  # fmt: skip

# With keys of 16, chunks of bfloat16 were wrong on an NVIDIA H200 with Triton 3.6, though not
# interpreted, and not alike from run to run; why is not known. Keys of 64 to 128 ran many times.
LEAST_KEYS = 64


@triton.jit
def _recurrent_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, a_ptr, b_ptr, log_rate_ptr, bias_ptr, limit, states_ptr, before_ptr, after_ptr,
    parts_ptr, out_ptr, qkv_stride, a_stride, b_stride, slot_stride, EPS,
    KH: tl.constexpr, H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, QUERIES: tl.constexpr, EARLY: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """One program computes the tokens of one sequence for BLOCK_V values of a head.

    Its part of the memory stays in registers. A head learns by at most `limit`. With CHANNELS, each
    channel of keys forgets by itself, and `limit` is the lowest logarithm of what remains, or 0.
    """
    blocks: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    number = tl.program_id(0)
    head = number // blocks % H
    sequence, first, count = tokens_of(parts_ptr, number // (blocks * H), QUERIES)
    if count == 0:
        return
    k_at = tl.arange(0, BLOCK_K)
    v_at = number % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    memory_at = states_ptr + head * (DK * DV) + k_at[:, None] * DV + v_at[None, :]
    inside = (k_at < DK)[:, None] & (v_at < DV)[None, :]
    slot = tl.load(before_ptr + sequence)
    memory = tl.load(memory_at + slot * slot_stride, mask=inside, other=0.0)
    log_rate = tl.load(log_rate_ptr + head)
    if CHANNELS:
        bias = tl.load(bias_ptr + head * DK + k_at, mask=k_at < DK, other=0.0)
    else:
        bias = tl.load(bias_ptr + head)
    q_ptr = qkv_ptr + head // (H // KH) * DK + k_at
    await_inputs(EARLY)
    for token in range(count):
        row = first + token
        at = row * qkv_stride
        q = tl.load(q_ptr + at, mask=k_at < DK, other=0.0).to(tl.float32)
        k = tl.load(q_ptr + at + KH * DK, mask=k_at < DK, other=0.0).to(tl.float32)
        v = tl.load(qkv_ptr + at + 2 * KH * DK + head * DV + v_at, mask=v_at < DV, other=0.0)
        learn = learn_rate(tl.load(b_ptr + row * b_stride + head), 1.0 if CHANNELS else limit)
        slot = tl.load(after_ptr + row)
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + EPS) * (DK**-0.5)
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + EPS)
        if CHANNELS:
            a_at = a_ptr + row * a_stride + head * DK + k_at
            x = tl.load(a_at, mask=k_at < DK, other=0.0).to(tl.float32) + bias
            lowered = limit / (1.0 + tl.exp(-tl.exp(log_rate) * x))
            log = tl.where(limit < 0.0, lowered, log_forget(softplus(x), log_rate))
            memory *= tl.exp(log)[:, None]
        else:
            a = tl.load(a_ptr + row * a_stride + head).to(tl.float32)
            memory *= tl.exp(log_forget(softplus(a + bias), log_rate))
        known = tl.sum(memory * k[:, None], axis=0)
        memory += k[:, None] * ((v.to(tl.float32) - known) * learn)[None, :]
        out = tl.sum(memory * q[:, None], axis=0)
        out_at = out_ptr + (row * H + head) * DV + v_at
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=v_at < DV)
        tl.store(memory_at + slot * slot_stride, memory, mask=inside & (slot >= 0))
    let_next_begin(EARLY)


def gated_delta(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    rates: DeltaRates,
    states: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """The outputs [T, H, Dv] of qkv [T, 2 * KH * Dk + H * Dv], with a, b [T, H].

    Decode, and sequences with few tokens of a prefill, read a memory once, and write it for each
    kept token. Longer ones are computed in chunks, except in float32 and with keys of less than
    LEAST_KEYS; see `delta_chunks`.
    """
    _, num_heads, key_size, value_size = states.shape
    assert qkv.stride(1) == 1 and states[0].is_contiguous()
    a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (a, b))
    out = step.outputs(qkv, len(qkv), num_heads, value_size)
    if step.ends is None:
        one_by_one(qkv, a, b, rates, states, step, None, out)
        return out
    parts = step.chunks.parts
    if computes_chunks(qkv.dtype) and key_size >= LEAST_KEYS:
        parts = step.chunks.short
        if step.chunks.num_long:
            compute_chunks(qkv, a, b, rates, states, step, out)
    if len(parts):
        one_by_one(qkv, a, b, rates, states, step, parts, out)
    return out


def one_by_one(
    qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rates: DeltaRates | ChannelRates,
    states: torch.Tensor, step: StateStep, parts: torch.Tensor | None, out: torch.Tensor,
) -> None:  # fmt: skip
    """Compute the sequences in `parts`, or those of a decode step."""
    limit = rates.most if isinstance(rates, DeltaRates) else rates.lowest or 0.0
    _, num_heads, key_size, value_size = states.shape
    block_v = value_block(num_heads, value_size)
    is_decode = parts is None
    parts = step.before if parts is None else parts
    _recurrent_kernel[(len(parts) * num_heads * cdiv(value_size, block_v),)](
        qkv, a, b, rates.log_rate, rates.bias, limit, states, step.before, step.after, parts,
        out, qkv.stride(0), a.stride(0), b.stride(0), states.stride(0), EPS,
        KH=(qkv.shape[1] - num_heads * value_size) // (2 * key_size), H=num_heads, DK=key_size,
        DV=value_size, BLOCK_K=next_power_of_2(key_size), BLOCK_V=block_v,
        QUERIES=step.num_queries if is_decode else 0, CHANNELS=isinstance(rates, ChannelRates),
        **(early(qkv.device) if is_decode else {"EARLY": False}),
    )  # fmt: skip
