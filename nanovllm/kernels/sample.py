"""Sampling as Triton kernels: one pass over the logits, for greedy and temperature rows together.

The twin is `plain.sample`, whose hash this is: B rows, V tokens, one race of exponential times.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from nanovllm.kernels.common import INTERPRETED
from nanovllm.kernels.plain import GOLDEN, SHRINK, SMALLEST

BLOCK = 1024  # tokens that a program looks at together
PROGRAMS = 4096  # a row is cut into pieces, so that few rows fill the device too
SPREAD = tl.constexpr(GOLDEN)
SCALE = tl.constexpr(SHRINK)
SHIFT = tl.constexpr(SMALLEST)


@triton.jit
def _log(x):  # type: ignore[no-untyped-def]
    """The hardware's logarithm: within 2^-22 of the true one, or of its share of a large one."""
    return tl.log(x) if INTERPRETED else libdevice.fast_logf(x)


@triton.jit
def _log_exponential(key, ids):  # type: ignore[no-untyped-def]
    """Logarithms of exponential numbers, as `plain.log_exponential` defines them, to about 3e-6."""
    low, high = key.to(tl.int32), (key >> 32).to(tl.int32)
    x = ((ids * SPREAD) ^ low) * 0x21F0AAAD
    x = ((x ^ (x >> 15)) + high) * 0x735A2D97
    x = x ^ (x >> 15)
    u = tl.abs(x.to(tl.float32)) * SCALE + SHIFT
    # -log1p(-u): by its series where 1 - u would round away what tells the small times apart.
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    return _log(tl.where(u < 1 / 16, series, -_log(1.0 - u)))


@triton.jit(do_not_specialize=["blocks"])
def _sample_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, temperatures_ptr, keys_ptr, best_ptr, ids_ptr, logits_stride, vocab_size, blocks,
    RACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program finds the first of the best tokens in one piece of one row: `blocks` blocks."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * blocks * BLOCK
    end = tl.minimum(start + blocks * BLOCK, vocab_size)
    n = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    best_id = tl.minimum(start + n, vocab_size - 1)
    if RACE:
        temperature = tl.load(temperatures_ptr + row)
        key = tl.load(keys_ptr + row)
    for first in range(start, end, BLOCK):
        ids = first + n
        at = logits_ptr + row * logits_stride + ids
        score = tl.load(at, mask=ids < end, other=-float("inf")).to(tl.float32)
        if RACE:  # noqa: SIM102
            if temperature > 0:
                score = score - temperature * _log_exponential(key, ids)
        better = score > best
        best = tl.where(better, score, best)
        best_id = tl.where(better, ids, best_id)
    top = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == top, best_id, vocab_size - 1), axis=0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + at, top)
    tl.store(ids_ptr + at, winner)


@triton.jit(do_not_specialize=["num_pieces"])
def _first_best_kernel(  # type: ignore[no-untyped-def]
    best_ptr, ids_ptr, out_ptr, num_pieces, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program finds the first of the best pieces of one row."""
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    inside = n < num_pieces
    best = tl.load(best_ptr + row * num_pieces + n, mask=inside, other=-float("inf"))
    ids = tl.load(ids_ptr + row * num_pieces + n, mask=inside, other=2147483647)
    top = tl.max(best, axis=0)
    tl.store(out_ptr + row, tl.min(tl.where(best == top, ids, 2147483647), axis=0).to(tl.int64))


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor | None, keys: torch.Tensor | None
) -> torch.Tensor:
    """Token ids [B] for logits [B, V], as `plain.sample` says. Reads the logits once."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    row_blocks = triton.cdiv(vocab_size, BLOCK)
    blocks = triton.cdiv(row_blocks, min(row_blocks, max(1, PROGRAMS // num_rows)))
    pieces = triton.cdiv(row_blocks, blocks)
    best = logits.new_empty(num_rows, pieces, dtype=torch.float32)
    ids = logits.new_empty(num_rows, pieces, dtype=torch.int32)
    out = logits.new_empty(num_rows, dtype=torch.int64)
    race = temperatures is not None and keys is not None
    _sample_kernel[(num_rows, pieces)](
        logits, temperatures if race else logits, keys if race else logits, best, ids,
        logits.stride(0), vocab_size, blocks, RACE=race, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    _first_best_kernel[(num_rows,)](
        best, ids, out, pieces, BLOCK=triton.next_power_of_2(min(row_blocks, PROGRAMS)), num_warps=1
    )
    return out
