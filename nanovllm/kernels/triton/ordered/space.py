"""The state spaces of Mamba 2 in one order of sums, as `delta`: token by token in all steps.

H heads of inputs [P], G groups of B and C [N], states [P, N].
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.operands.rates import SpaceRates
from nanovllm.kernels.operands.state_step import StateStep
from nanovllm.kernels.triton.attention.ordered import UNFUSED, fma
from nanovllm.kernels.triton.common import await_inputs, early, let_next_begin
from nanovllm.kernels.triton.ordered.parts import OF_A_STEP, parts_of, tokens_of
from nanovllm.kernels.triton.state.gates import log_forget, softplus

TILE = 1024  # numbers of a state that a program has: one warp, so that no sum crosses warps


@triton.jit
def _read(  # type: ignore[no-untyped-def]
    xbc_ptr, dt_ptr, after_ptr, row, xbc_stride, dt_stride, head, p, n,
    G: tl.constexpr, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A token's numbers as they are stored, and the slot for the state after it."""
    row_ptr = xbc_ptr + row * xbc_stride
    x = tl.load(row_ptr + head * P + p, mask=p < P, other=0.0)
    b_ptr = row_ptr + H * P + head // (H // G) * N + n
    b = tl.load(b_ptr, mask=n < N, other=0.0)
    c = tl.load(b_ptr + G * N, mask=n < N, other=0.0)
    return x, b, c, tl.load(dt_ptr + row * dt_stride + head), tl.load(after_ptr + row)


@triton.jit(do_not_specialize=["queries", "dt_stride"], do_not_specialize_on_alignment=OF_A_STEP)
def _ordered_space_kernel(  # type: ignore[no-untyped-def]
    xbc_ptr, dt_ptr, log_rate_ptr, bias_ptr, skip_ptr, low, high, states_ptr, before_ptr,
    after_ptr, parts_ptr, queries, out_ptr, xbc_stride, dt_stride, slot_stride,
    G: tl.constexpr, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program computes the tokens of one sequence for BLOCK_P inputs of a head.

    The numbers of two tokens are read ahead.
    """
    blocks: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    number = tl.program_id(0)
    head = number // blocks % H
    sequence, first, count = tokens_of(parts_ptr, number // (blocks * H), queries)
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
    await_inputs(EARLY)
    last = first + count - 1
    x, b, c, dt, slot = _read(
        xbc_ptr, dt_ptr, after_ptr, first, xbc_stride, dt_stride, head, p, n, G, H, P, N
    )
    next_x, next_b, next_c, next_dt, next_slot = _read(
        xbc_ptr, dt_ptr, after_ptr, tl.minimum(first + 1, last), xbc_stride, dt_stride, head, p, n,
        G, H, P, N,
    )  # fmt: skip
    for token in range(count):
        row = first + token
        third_x, third_b, third_c, third_dt, third_slot = _read(
            xbc_ptr, dt_ptr, after_ptr, tl.minimum(row + 2, last), xbc_stride, dt_stride, head, p,
            n, G, H, P, N,
        )  # fmt: skip
        x, b, c = x.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
        time = tl.minimum(tl.maximum(softplus(dt.to(tl.float32) + bias), low), high)
        old = state * tl.exp(log_forget(time, log_rate))
        state = fma(tl.broadcast_to((x * time)[:, None], old.shape), b[None, :], old)
        out = fma(x, skip, tl.sum(state * c[None, :], axis=1))
        out_at = out_ptr + (row * H + head) * P + p
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=p < P)
        if slot >= 0:
            tl.store(state_at + slot * slot_stride, state, mask=inside)
        x, b, c, dt, slot = next_x, next_b, next_c, next_dt, next_slot
        next_x, next_b, next_c, next_dt = third_x, third_b, third_c, third_dt
        next_slot = third_slot
    let_next_begin(EARLY)


def state_space(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    rates: SpaceRates,
    states: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """The outputs [T, H, P] of xbc [T, H * P + 2 * G * N], with dt [T, H].

    One launch, in prefills too. It reads a state once, and writes it for each kept token.
    """
    _, num_heads, head_dim, size = states.shape
    assert xbc.stride(1) == 1 and states[0].is_contiguous()
    dt = dt if dt.stride(1) == 1 else dt.contiguous()
    out = step.outputs(xbc, len(xbc), num_heads, head_dim)
    parts, count, queries = parts_of(step)
    block_n = next_power_of_2(size)
    block_p = max(1, TILE // block_n)
    _ordered_space_kernel[(count * num_heads * cdiv(head_dim, block_p),)](
        xbc, dt, rates.log_rate, rates.bias, rates.skip, rates.low, rates.high, states,
        step.before, step.after, parts, queries, out, xbc.stride(0), dt.stride(0),
        states.stride(0), G=(xbc.shape[1] - num_heads * head_dim) // (2 * size), H=num_heads,
        P=head_dim, N=size, BLOCK_P=block_p, BLOCK_N=block_n, num_warps=1, **UNFUSED,
        **early(xbc.device),
    )  # fmt: skip
    return out
