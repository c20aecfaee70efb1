"""A short convolution over the tokens of each sequence. C channels, filters of W tokens."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.operands.state_chunks import CHUNK
from nanovllm.kernels.operands.state_step import StateStep
from nanovllm.kernels.triton.common import await_inputs, early, let_next_begin

BLOCK = 256  # channels of a program, which is one warp: a thread reads 16 bytes of 16-bit numbers
TOKENS = 16  # of a program in a prefill
MANY_SEQUENCES, ROWS = 128, 4  # in decode steps of so many, a program computes ROWS sequences


@triton.jit
def taps_of(weight_ptr, first, C: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weights of BLOCK channels from `first` on: a tuple of W tensors [BLOCK] in float32.

    A channel's weights are adjacent in memory, so up to four of them are read as a tile.
    """
    taps = ()
    if W <= 4:
        c, tap = first + tl.arange(0, BLOCK)[:, None], tl.arange(0, 4)[None, :]
        tile = tl.load(weight_ptr + c * W + tap, mask=(c < C) & (tap < W), other=0.0)
        even, odd = tl.split(tl.reshape(tile.to(tl.float32), [BLOCK, 2, 2]))
        tap0, tap2 = tl.split(even)
        tap1, tap3 = tl.split(odd)
        taps = (tap0, tap1, tap2, tap3)  # type: ignore[assignment]
    else:
        channel = first + tl.arange(0, BLOCK)
        for number in tl.static_range(W):
            weight = tl.load(weight_ptr + channel * W + number, mask=channel < C, other=0.0)
            taps += (weight.to(tl.float32),)  # type: ignore[assignment]
    return taps


@triton.jit
def window_before(  # type: ignore[no-untyped-def]
    states_ptr, slot, c, inside, slot_stride, C: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """The last W - 1 inputs before a sequence's first token, the oldest first."""
    at = states_ptr + slot * slot_stride + c
    window = ()
    for tap in tl.static_range(W - 1):
        window += (tl.load(at + tap * C, mask=inside, other=0.0),)  # type: ignore[assignment]
    return window


@triton.jit
def store_window(  # type: ignore[no-untyped-def]
    window, states_ptr, slot, c, inside, slot_stride, C: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Leave W - 1 inputs in a slot; a slot of -1 is none."""
    at = states_ptr + slot * slot_stride + c
    for tap in tl.static_range(W - 1):
        tl.store(at + tap * C, window[tap], mask=inside & (slot >= 0))


@triton.jit
def filtered(total, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum, or silu of it."""
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    return total


@triton.jit(do_not_specialize=["num_sequences"])
def _decode_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, states_ptr, before_ptr, after_ptr, out_ptr, num_sequences,
    x_stride, slot_stride, C: tl.constexpr, W: tl.constexpr, QUERIES: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One warp computes the tokens of ROWS sequences for BLOCK channels.

    It reads all inputs of its channels before it writes the first state.
    """
    sequence = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c, real = channel[None, :], sequence < num_sequences
    inside = real[:, None] & (c < C)
    before = tl.load(before_ptr + sequence, mask=real, other=0)[:, None]
    window = window_before(states_ptr, before, c, inside, slot_stride, C, W)
    weights = taps_of(weight_ptr, tl.program_id(1) * BLOCK, C, W, BLOCK)
    start = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        start += tl.load(bias_ptr + channel, mask=channel < C, other=0.0)
    await_inputs(EARLY)
    for query in tl.static_range(QUERIES):
        row = (sequence * QUERIES + query)[:, None]
        x = tl.load(x_ptr + row * x_stride + c, mask=inside, other=0.0)
        window += (x.to(states_ptr.dtype.element_ty),)
    for query in tl.static_range(QUERIES):
        row = sequence * QUERIES + query
        total = tl.zeros([ROWS, BLOCK], tl.float32) + start[None, :]
        for tap in tl.static_range(W):
            total += window[query + tap].to(tl.float32) * weights[tap][None, :]
        out = filtered(total, SILU).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row[:, None] * C + c, out, mask=inside)
        slot = tl.load(after_ptr + row, mask=real, other=-1)[:, None]
        kept = window[query + 1 :]
        store_window(kept, states_ptr, slot, c, inside, slot_stride, C, W)
    let_next_begin(EARLY)


@triton.jit
def _prefill_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, states_ptr, before_ptr, chunks_ptr, out_ptr, x_stride, slot_stride,
    C: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One warp computes TOKENS tokens of a chunk for BLOCK channels.

    It reads all inputs of its channels before it computes: each once, in registers of a thread.
    """
    chunk_ptr = chunks_ptr + tl.program_id(0) // (CHUNK // TOKENS) * 4
    skipped = tl.program_id(0) % (CHUNK // TOKENS) * TOKENS
    count = tl.load(chunk_ptr + 1) - skipped
    if count > 0:
        row = tl.load(chunk_ptr).to(tl.int64) + skipped
        sequence, start = tl.load(chunk_ptr + 2), tl.load(chunk_ptr + 3).to(tl.int64)
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        state_at = states_ptr + tl.load(before_ptr + sequence) * slot_stride + c
        window = ()
        for token in tl.static_range(TOKENS + W - 1):
            source = row + (token - (W - 1))
            is_here = (source >= start) & (token - (W - 1) < count)
            x = tl.load(x_ptr + source * x_stride + c, mask=(c < C) & is_here, other=0.0)
            x = x.to(states_ptr.dtype.element_ty)
            if token < W - 1:  # before the sequence's first token are inputs of its state
                old_at = state_at + (source - start + W - 1) * C
                old = tl.load(old_at, mask=(c < C) & (source < start), other=0.0)
                x = tl.where(source < start, old, x)
            window += (x,)  # type: ignore[assignment]
        weights = taps_of(weight_ptr, tl.program_id(1) * BLOCK, C, W, BLOCK)
        bias = tl.zeros([BLOCK], tl.float32)
        if BIAS:
            bias += tl.load(bias_ptr + c, mask=c < C, other=0.0)
        for token in tl.static_range(TOKENS):
            total = bias
            for tap in tl.static_range(W):
                total += window[token + tap].to(tl.float32) * weights[tap]
            out = filtered(total, SILU).to(out_ptr.dtype.element_ty)
            out_at = out_ptr + (row + token) * C + c
            tl.store(out_at, out, mask=(c < C) & (token < count))


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
    slot = tl.load(before_ptr + sequence)
    before = window_before(states_ptr, slot, c, c < C, slot_stride, C, W)
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
        store_window(window, states_ptr, slot, c, c < C, slot_stride, C, W)


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
    return convolve({}, x, weight, bias, states, step, silu)


def convolve(
    options: dict[str, bool],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    step: StateStep,
    silu: bool,
) -> torch.Tensor:
    """As `causal_conv`, with options of the launches that compute sums."""
    channels, width = weight.shape
    assert x.stride(1) == 1 and weight.is_contiguous() and states[0].is_contiguous()
    out = step.outputs(x, *x.shape)
    inputs = (x, weight, weight if bias is None else bias, states, step.before)
    strides = x.stride(0), states.stride(0)
    is_fixed = {"C": channels, "W": width}
    has = {"BIAS": bias is not None, "SILU": silu}
    blocks = cdiv(channels, BLOCK)
    if step.ends is None:
        sequences = len(step.before)
        rows = ROWS if sequences >= MANY_SEQUENCES else 1
        _decode_kernel[(cdiv(sequences, rows), blocks)](
            *inputs, step.after, out, sequences, *strides, **is_fixed, **has,
            QUERIES=step.num_queries, ROWS=rows, BLOCK=BLOCK, num_warps=1, **early(x.device),
            **options,
        )  # fmt: skip
        return out
    chunks = step.chunks
    _prefill_kernel[(len(chunks.chunks) * (CHUNK // TOKENS), blocks)](
        *inputs, chunks.chunks, out, *strides, **is_fixed, **has, CHUNK=CHUNK, TOKENS=TOKENS,
        BLOCK=BLOCK, num_warps=1, **options,
    )  # fmt: skip
    _keep_kernel[(len(chunks.parts), blocks)](
        x, states, step.before, step.after, chunks.parts, chunks.kept, *strides, **is_fixed,
        BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip
    return out
