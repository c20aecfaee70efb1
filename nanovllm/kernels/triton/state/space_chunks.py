"""The state spaces of Mamba 2 for chunks of tokens, with products of matrices.

In a chunk with the state S [P, N] before it, let F be the sums of the logarithms of the factors up
to each token, t its time step, and i, j tokens. Then

    output i = exp(F_i) S C_i + sum over j <= i of exp(F_i - F_j) (C_i B_j) t_j x_j + skip * x_i,
    S after the last token n = exp(F_n) S + sum over j of exp(F_n - F_j) t_j x_j B_j.

Sums: those over j go over all tokens of a chunk in one product. To them, the state's part is added,
then the skip; to the state, the chunk's part. Products are as in `products_in`.
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


@triton.jit
def _walk_kernel(  # type: ignore[no-untyped-def]
    xbc_ptr, dt_ptr, log_rate_ptr, bias_ptr, skip_ptr, low, high, states_ptr, before_ptr,
    after_ptr, parts_ptr, chunks_ptr, out_ptr, xbc_stride, dt_stride, slot_stride,
    G: tl.constexpr, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """One program goes through a sequence's chunks for BLOCK_P inputs of a head.

    Its part of the state stays in registers, transposed, as products of many rows are faster.
    """
    blocks: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    number = tl.program_id(0)
    head, part_ptr = number // blocks % H, parts_ptr + number // (blocks * H) * 8
    n = tl.arange(0, BLOCK_N)
    p = number % blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    state_at = states_ptr + head * (P * N) + p[None, :] * N + n[:, None]
    inside = (n < N)[:, None] & (p < P)[None, :]
    slot = tl.load(before_ptr + tl.load(part_ptr))
    state = tl.load(state_at + slot * slot_stride, mask=inside, other=0.0)
    log_rate, bias = tl.load(log_rate_ptr + head), tl.load(bias_ptr + head)
    skip = tl.load(skip_ptr + head)
    token = tl.arange(0, CHUNK)
    is_seen = token[:, None] >= token[None, :]
    for chunk in range(tl.load(part_ptr + 3), tl.load(part_ptr + 4)):
        first = tl.load(chunks_ptr + chunk * 4).to(tl.int64)
        count = tl.load(chunks_ptr + chunk * 4 + 1)
        row, real = first + token, token < count
        row_ptr = xbc_ptr + row[:, None] * xbc_stride
        p_real, n_real = real[:, None] & (p < P)[None, :], real[:, None] & (n < N)[None, :]
        x = tl.load(row_ptr + head * P + p[None, :], mask=p_real, other=0.0)
        b_at = row_ptr + H * P + head // (H // G) * N + n[None, :]
        b = tl.load(b_at, mask=n_real, other=0.0).to(DTYPE)
        c = tl.load(b_at + G * N, mask=n_real, other=0.0).to(DTYPE)
        dt = tl.load(dt_ptr + row * dt_stride + head, mask=real, other=0.0).to(tl.float32)
        time = tl.minimum(tl.maximum(softplus(dt + bias), low), high)
        logs = tl.cumsum(tl.where(real, log_forget(time, log_rate), 0.0), axis=0)
        added = x.to(tl.float32) * time[:, None]
        decay = tl.exp(tl.where(is_seen, logs[:, None] - logs[None, :], 0.0))
        scores = tl.where(is_seen, multiply(c, tl.trans(b)) * decay, 0.0)
        out = multiply(scores.to(DTYPE), added.to(DTYPE))
        out += multiply(c, state.to(DTYPE)) * tl.exp(logs)[:, None]
        out += skip * x.to(tl.float32)
        out_at = out_ptr + (row * H + head)[:, None] * P + p[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=p_real)
        end = tl.min(logs, axis=0)
        added = (added * tl.exp(end - logs)[:, None]).to(DTYPE)
        state = state * tl.exp(end) + multiply(tl.trans(b), added)
        slot = tl.load(after_ptr + first + count - 1)
        tl.store(state_at + slot * slot_stride, state, mask=inside & (slot >= 0))


def compute_chunks(
    xbc: torch.Tensor, dt: torch.Tensor, rates: SpaceRates, states: torch.Tensor, step: StateStep,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Compute the sequences with many tokens: their outputs, and the states that are kept."""
    _, num_heads, head_dim, size = states.shape
    dtype = products_in(xbc.dtype)
    block_p = value_block(num_heads, head_dim)
    _walk_kernel[(step.chunks.num_long * num_heads * cdiv(head_dim, block_p),)](
        xbc, dt, rates.log_rate, rates.bias, rates.skip, rates.low, rates.high, states,
        step.before, step.after, step.chunks.long, step.chunks.chunks, out,
        xbc.stride(0), dt.stride(0), states.stride(0),
        G=(xbc.shape[1] - num_heads * head_dim) // (2 * size), H=num_heads, P=head_dim, N=size,
        BLOCK_P=block_p, BLOCK_N=max(16, next_power_of_2(size)), CHUNK=CHUNK,
        DTYPE=tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
        num_warps=8, num_stages=num_stages(dtype),
    )  # fmt: skip
