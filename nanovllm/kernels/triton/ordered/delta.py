"""Gated delta rules in one order of sums: prompts and decode steps are computed token by token.

H heads of values [Dv], KH heads of keys [Dk], memories [Dk, Dv].

**The contract.** A memory after n tokens is computed from the one after n - 1, which is float32 and
is stored as it is. All steps launch the same program, compiled once for a layer: its tile is a
function of the layer's sizes, and no number of a step is a constant in it.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.operands.rates import ChannelRates, DeltaRates
from nanovllm.kernels.operands.state_step import StateStep
from nanovllm.kernels.plain.gated_delta import EPS
from nanovllm.kernels.triton.attention.ordered import UNFUSED, fma
from nanovllm.kernels.triton.common import await_inputs, early, let_next_begin
from nanovllm.kernels.triton.ordered.parts import OF_A_STEP, parts_of, tokens_of
from nanovllm.kernels.triton.state.gates import learn_rate, log_forget, softplus

# A program is one warp, so that no sum crosses warps. A thread has 32 numbers of a memory.
TILE, LEAST_VALUES = 1024, 8


@triton.jit
def _read(  # type: ignore[no-untyped-def]
    qkv_ptr, a_ptr, b_ptr, after_ptr, row, qkv_stride, a_stride, b_stride, head, k_at, v_at,
    KH: tl.constexpr, H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A token's numbers as they are stored, and the slot for the memory after it."""
    row_ptr = qkv_ptr + row * qkv_stride
    q_ptr = row_ptr + head // (H // KH) * DK + k_at
    q = tl.load(q_ptr, mask=k_at < DK, other=0.0)
    k = tl.load(q_ptr + KH * DK, mask=k_at < DK, other=0.0)
    v = tl.load(row_ptr + 2 * KH * DK + head * DV + v_at, mask=v_at < DV, other=0.0)
    if CHANNELS:
        a = tl.load(a_ptr + row * a_stride + head * DK + k_at, mask=k_at < DK, other=0.0)
    else:
        a = tl.load(a_ptr + row * a_stride + head)
    return q, k, v, a, tl.load(b_ptr + row * b_stride + head), tl.load(after_ptr + row)


@triton.jit(do_not_specialize=["queries", "b_stride"], do_not_specialize_on_alignment=OF_A_STEP)
def _ordered_delta_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, a_ptr, b_ptr, log_rate_ptr, bias_ptr, limit, states_ptr, before_ptr, after_ptr,
    parts_ptr, queries, out_ptr, qkv_stride, a_stride, b_stride, slot_stride, EPS,
    KH: tl.constexpr, H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EARLY: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One program computes the tokens of one sequence for BLOCK_V values of a head.

    Arguments are those of `gated_delta`'s kernel. The numbers of two tokens are read ahead.
    """
    blocks: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    number = tl.program_id(0)
    head = number // blocks % H
    sequence, first, count = tokens_of(parts_ptr, number // (blocks * H), queries)
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
    await_inputs(EARLY)
    last = first + count - 1
    q, k, v, a, b, slot = _read(
        qkv_ptr, a_ptr, b_ptr, after_ptr, first, qkv_stride, a_stride, b_stride, head, k_at, v_at,
        KH, H, DK, DV, CHANNELS,
    )  # fmt: skip
    next_q, next_k, next_v, next_a, next_b, next_slot = _read(
        qkv_ptr, a_ptr, b_ptr, after_ptr, tl.minimum(first + 1, last), qkv_stride, a_stride,
        b_stride, head, k_at, v_at, KH, H, DK, DV, CHANNELS,
    )  # fmt: skip
    for token in range(count):
        row = first + token
        third_q, third_k, third_v, third_a, third_b, third_slot = _read(
            qkv_ptr, a_ptr, b_ptr, after_ptr, tl.minimum(row + 2, last), qkv_stride, a_stride,
            b_stride, head, k_at, v_at, KH, H, DK, DV, CHANNELS,
        )  # fmt: skip
        q, k = q.to(tl.float32), k.to(tl.float32)
        # A unit multiplies what was computed with the whole vector, so no product waits for it.
        q_unit = tl.rsqrt(tl.sum(q * q, axis=0) + EPS) * (DK**-0.5)
        k_unit = tl.rsqrt(tl.sum(k * k, axis=0) + EPS)
        learn = learn_rate(b, 1.0 if CHANNELS else limit)
        x = a.to(tl.float32) + bias
        if CHANNELS:
            lowered = limit / (1.0 + tl.exp(-tl.exp(log_rate) * x))
            log = tl.where(limit < 0.0, lowered, log_forget(softplus(x), log_rate))
            memory *= tl.exp(log)[:, None]
        else:
            memory *= tl.exp(log_forget(softplus(x), log_rate))
        known = tl.sum(memory * k[:, None], axis=0) * k_unit
        change = (v.to(tl.float32) - known) * learn * k_unit
        memory = fma(tl.broadcast_to(k[:, None], memory.shape), change[None, :], memory)
        out = tl.sum(memory * q[:, None], axis=0) * q_unit
        out_at = out_ptr + (row * H + head) * DV + v_at
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=v_at < DV)
        if slot >= 0:
            tl.store(memory_at + slot * slot_stride, memory, mask=inside)
        q, k, v, a, b, slot = next_q, next_k, next_v, next_a, next_b, next_slot
        next_q, next_k, next_v, next_a = third_q, third_k, third_v, third_a
        next_b, next_slot = third_b, third_slot
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

    One launch, in prefills too. It reads a memory once, and writes it for each kept token.
    """
    return _one_by_one(qkv, a, b, rates, rates.most, states, step)


def channel_delta(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    rates: ChannelRates,
    states: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """As `gated_delta`, with a [T, H * Dk] of channels that forget by themselves."""
    return _one_by_one(qkv, a, b, rates, rates.lowest or 0.0, states, step)


def _one_by_one(
    qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rates: DeltaRates | ChannelRates,
    limit: float, states: torch.Tensor, step: StateStep,
) -> torch.Tensor:  # fmt: skip
    _, num_heads, key_size, value_size = states.shape
    assert qkv.stride(1) == 1 and states[0].is_contiguous()
    a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (a, b))
    out = step.outputs(qkv, len(qkv), num_heads, value_size)
    parts, count, queries = parts_of(step)
    block_k = next_power_of_2(key_size)
    block_v = max(LEAST_VALUES, TILE // block_k)
    _ordered_delta_kernel[(count * num_heads * cdiv(value_size, block_v),)](
        qkv, a, b, rates.log_rate, rates.bias, limit, states, step.before, step.after, parts,
        queries, out, qkv.stride(0), a.stride(0), b.stride(0), states.stride(0), EPS,
        KH=(qkv.shape[1] - num_heads * value_size) // (2 * key_size), H=num_heads, DK=key_size,
        DV=value_size, BLOCK_K=block_k, BLOCK_V=block_v, CHANNELS=isinstance(rates, ChannelRates),
        num_warps=1, **UNFUSED, **early(qkv.device),
    )  # fmt: skip
    return out
