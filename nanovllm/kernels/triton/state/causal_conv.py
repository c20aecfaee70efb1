"""A short convolution over the tokens of each sequence. C channels, filters of W tokens."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.operands.state_chunks import CHUNK
from nanovllm.kernels.operands.state_step import StateStep
from nanovllm.kernels.triton.common import await_inputs, early, let_next_begin

DECODE_BLOCK, PREFILL_BLOCK = 128, 64  # channels of a program


@triton.jit
def window_before(  # type: ignore[no-untyped-def]
    states_ptr, before_ptr, sequence, c, slot_stride, C: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The last W - 1 inputs before a sequence's first token, the oldest first: a tuple of [c]."""
    at = states_ptr + tl.load(before_ptr + sequence) * slot_stride + c
    window = ()
    for tap in tl.static_range(W - 1):
        window += (tl.load(at + tap * C, mask=c < C, other=0.0),)  # type: ignore[assignment]
    return window


@triton.jit
def store_window(  # type: ignore[no-untyped-def]
    window, states_ptr, slot, c, slot_stride, C: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Leave W - 1 inputs in a slot; a slot of -1 is none."""
    at = states_ptr + slot * slot_stride + c
    for tap in tl.static_range(W - 1):
        tl.store(at + tap * C, window[tap], mask=(c < C) & (slot >= 0))


@triton.jit
def filtered(total, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum, or silu of it."""
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    return total


@triton.jit
def _decode_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, states_ptr, before_ptr, after_ptr, out_ptr, x_stride, slot_stride,
    C: tl.constexpr, W: tl.constexpr, QUERIES: tl.constexpr, BIAS: tl.constexpr,
    SILU: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program computes the tokens of one sequence for BLOCK channels.

    A thread reads all inputs of its channels before it writes the first state.
    """
    sequence = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    window = window_before(states_ptr, before_ptr, sequence, c, slot_stride, C, W)
    await_inputs(EARLY)
    for query in tl.static_range(QUERIES):
        row = sequence * QUERIES + query
        x = tl.load(x_ptr + row * x_stride + c, mask=c < C, other=0.0)
        window += (x.to(states_ptr.dtype.element_ty),)
        total = tl.zeros([BLOCK], tl.float32)
        if BIAS:
            total += tl.load(bias_ptr + c, mask=c < C, other=0.0)
        for tap in tl.static_range(W):
            weight = tl.load(weight_ptr + c * W + tap, mask=c < C, other=0.0)
            total += window[tap].to(tl.float32) * weight.to(tl.float32)
        out = filtered(total, SILU).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * C + c, out, mask=c < C)
        window = window[1:]
        slot = tl.load(after_ptr + row)
        store_window(window, states_ptr, slot, c, slot_stride, C, W)
    let_next_begin(EARLY)


@triton.jit
def _prefill_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, states_ptr, before_ptr, chunks_ptr, out_ptr, x_stride, slot_stride,
    C: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes one chunk for BLOCK channels."""
    chunk_ptr = chunks_ptr + tl.program_id(0) * 4
    first, count = tl.load(chunk_ptr).to(tl.int64), tl.load(chunk_ptr + 1)
    sequence, start = tl.load(chunk_ptr + 2), tl.load(chunk_ptr + 3).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    token = tl.arange(0, CHUNK)[:, None]
    real = (token < count) & (c < C)
    row = first + token
    state_at = states_ptr + tl.load(before_ptr + sequence) * slot_stride + c
    total = tl.zeros([CHUNK, BLOCK], tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + c, mask=c < C, other=0.0)
    for tap in tl.static_range(W):
        source = row - (W - 1) + tap
        is_here = source >= start
        x = tl.load(x_ptr + source * x_stride + c, mask=real & is_here, other=0.0)
        x = x.to(states_ptr.dtype.element_ty).to(tl.float32)
        if tap < W - 1:  # inputs before the sequence's first token
            old_at = state_at + (source - start + W - 1) * C
            x += tl.load(old_at, mask=real & (source < start), other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + c * W + tap, mask=c < C, other=0.0)
        total += x * weight.to(tl.float32)
    out = filtered(total, SILU).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * C + c, out, mask=real)


@triton.jit
def _keep_kernel(  # type: ignore[no-untyped-def]
    x_ptr, states_ptr, before_ptr, after_ptr, parts_ptr, kept_ptr, x_stride, slot_stride,
    C: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes the kept states of one sequence for BLOCK channels.

    It runs after all results are computed, and a thread reads the old state of its channels first.
    """
    part_ptr = parts_ptr + tl.program_id(0) * 8
    sequence, start = tl.load(part_ptr), tl.load(part_ptr + 1)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    before = window_before(states_ptr, before_ptr, sequence, c, slot_stride, C, W)
    for number in range(tl.load(part_ptr + 5), tl.load(part_ptr + 6)):
        last = tl.load(kept_ptr + number)
        window = ()
        for tap in tl.static_range(W - 1):
            source = last - (W - 2) + tap
            at = x_ptr + source.to(tl.int64) * x_stride + c
            x = tl.load(at, mask=(c < C) & (source >= start), other=0.0)
            x = x.to(states_ptr.dtype.element_ty)
            for place in tl.static_range(W - 1):
                x = tl.where(source - start + W - 1 == place, before[place], x)
            window += (x,)  # type: ignore[assignment]
        slot = tl.load(after_ptr + last)
        store_window(window, states_ptr, slot, c, slot_stride, C, W)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    step: StateStep,
    silu: bool,
) -> torch.Tensor:
    """Filter x [T, C] by weight [C, W].

    Decode reads and writes each token's x and state once. Prefill reads x from memory once and
    writes as much, then writes the kept states.
    """
    channels, width = weight.shape
    assert x.stride(1) == 1 and weight.is_contiguous() and states[0].is_contiguous()
    out = x.new_empty(x.shape)
    inputs = (x, weight, weight if bias is None else bias, states, step.before)
    strides = x.stride(0), states.stride(0)
    is_fixed = {"C": channels, "W": width}
    has = {"BIAS": bias is not None, "SILU": silu}
    if step.ends is None:
        grid = len(step.before), cdiv(channels, DECODE_BLOCK)
        _decode_kernel[grid](
            *inputs, step.after, out, *strides, **is_fixed, **has, QUERIES=step.num_queries,
            BLOCK=DECODE_BLOCK, num_warps=1, **early(x.device),
        )  # fmt: skip
        return out
    chunks = step.chunks
    _prefill_kernel[(len(chunks.chunks), cdiv(channels, PREFILL_BLOCK))](
        *inputs, chunks.chunks, out, *strides, **is_fixed, **has, CHUNK=CHUNK, BLOCK=PREFILL_BLOCK
    )
    _keep_kernel[(len(chunks.parts), cdiv(channels, DECODE_BLOCK))](
        x, states, step.before, step.after, chunks.parts, chunks.kept, *strides, **is_fixed,
        BLOCK=DECODE_BLOCK, num_warps=1,
    )  # fmt: skip
    return out
