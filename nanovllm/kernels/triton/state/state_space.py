"""The state spaces of Mamba 2. H heads of inputs [P], G groups of B and C [N], states [P, N]."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.operands.rates import SpaceRates
from nanovllm.kernels.operands.state_step import StateStep
from nanovllm.kernels.triton.common import await_inputs, early, let_next_begin
from nanovllm.kernels.triton.state.gates import (
    computes_chunks,
    log_forget,
    softplus,
    tokens_of,
    value_block,
)  # fmt: skip
from nanovllm.kernels.triton.state.space_chunks import compute_chunks


@triton.jit
def _recurrent_kernel(  # type: ignore[no-untyped-def]
    xbc_ptr, dt_ptr, log_rate_ptr, bias_ptr, skip_ptr, low, high, states_ptr, before_ptr,
    after_ptr, parts_ptr, out_ptr, xbc_stride, dt_stride, slot_stride,
    G: tl.constexpr, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, QUERIES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program computes the tokens of one sequence for BLOCK_P inputs of a head.

    Its part of the state stays in registers.
    """
    blocks: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    number = tl.program_id(0)
    head = number // blocks % H
    sequence, first, count = tokens_of(parts_ptr, number // (blocks * H), QUERIES)
    if count == 0:
        return
    n = tl.arange(0, BLOCK_N)
    p = number % blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    state_at = states_ptr + head * (P * N) + p[:, None] * N + n[None, :]
    inside = (p < P)[:, None] & (n < N)[None, :]
    slot = tl.load(before_ptr + sequence)
    state = tl.load(state_at + slot * slot_stride, mask=inside, other=0.0)
    log_rate, bias = tl.load(log_rate_ptr + head), tl.load(bias_ptr + head)
    skip = tl.load(skip_ptr + head)
    b_ptr = xbc_ptr + H * P + head // (H // G) * N + n
    await_inputs(EARLY)
    for token in range(count):
        row = first + token
        at = row * xbc_stride
        x = tl.load(xbc_ptr + at + head * P + p, mask=p < P, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + at, mask=n < N, other=0.0).to(tl.float32)
        c = tl.load(b_ptr + at + G * N, mask=n < N, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + row * dt_stride + head).to(tl.float32)
        slot = tl.load(after_ptr + row)
        time = tl.minimum(tl.maximum(softplus(dt + bias), low), high)
        state = state * tl.exp(log_forget(time, log_rate)) + (x * time)[:, None] * b[None, :]
        out = tl.sum(state * c[None, :], axis=1) + skip * x
        out_at = out_ptr + (row * H + head) * P + p
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=p < P)
        tl.store(state_at + slot * slot_stride, state, mask=inside & (slot >= 0))
    let_next_begin(EARLY)


def state_space(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    rates: SpaceRates,
    states: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """The outputs [T, H, P] of xbc [T, H * P + 2 * G * N], with dt [T, H].

    Decode, and sequences with few tokens of a prefill, read a state once, and write it for each
    kept token. Longer ones are computed in chunks, except in float32; see `space_chunks`.
    """
    _, num_heads, head_dim, _ = states.shape
    assert xbc.stride(1) == 1 and states[0].is_contiguous()
    dt = dt if dt.stride(1) == 1 else dt.contiguous()
    out = step.outputs(xbc, len(xbc), num_heads, head_dim)
    if step.ends is None:
        _one_by_one(xbc, dt, rates, states, step, None, out)
        return out
    parts = step.chunks.parts
    if computes_chunks(xbc.dtype):
        parts = step.chunks.short
        if step.chunks.num_long:
            compute_chunks(xbc, dt, rates, states, step, out)
    if len(parts):
        _one_by_one(xbc, dt, rates, states, step, parts, out)
    return out


def _one_by_one(
    xbc: torch.Tensor, dt: torch.Tensor, rates: SpaceRates, states: torch.Tensor, step: StateStep,
    parts: torch.Tensor | None, out: torch.Tensor,
) -> None:  # fmt: skip
    """Compute the sequences in `parts`, or those of a decode step."""
    _, num_heads, head_dim, size = states.shape
    block_p = value_block(num_heads, head_dim)
    is_decode = parts is None
    parts = step.before if parts is None else parts
    _recurrent_kernel[(len(parts) * num_heads * cdiv(head_dim, block_p),)](
        xbc, dt, rates.log_rate, rates.bias, rates.skip, rates.low, rates.high, states,
        step.before, step.after, parts, out, xbc.stride(0), dt.stride(0), states.stride(0),
        G=(xbc.shape[1] - num_heads * head_dim) // (2 * size), H=num_heads, P=head_dim, N=size,
        BLOCK_P=block_p, BLOCK_N=next_power_of_2(size),
        QUERIES=step.num_queries if is_decode else 0,
        **(early(xbc.device) if is_decode else {"EARLY": False}),
    )  # fmt: skip
