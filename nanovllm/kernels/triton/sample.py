"""Sampling: one pass over the logits, for greedy and temperature rows together.

B rows, V tokens. A row is cut into pieces; one kernel finds each piece's first token of the race, a
second one the first of the pieces.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.triton.mask import bits_of
from nanovllm.kernels.triton.noise import log_exponential

BLOCK = 1024  # tokens that a program reads together
PROGRAMS = 4096  # about as many as are launched: a few rows, in pieces, fill the device too


@triton.jit(do_not_specialize=["blocks"])
def _sample_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, temperatures_ptr, keys_ptr, masks_ptr, best_ptr, ids_ptr, logits_stride,
    masks_stride, vocab_size, blocks, first_id,
    RACE: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program finds the first best token of one piece of one row: `blocks` blocks.

    The first column is of the token `first_id`.
    """
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
        inside = ids < end
        if MASKED:
            inside = bits_of(masks_ptr + row * masks_stride, ids, inside)
        score = tl.load(at, mask=inside, other=-float("inf")).to(tl.float32)
        if RACE:  # noqa: SIM102
            if temperature > 0:
                score = score - temperature * log_exponential(key, first_id + ids)
        better = score > best
        best = tl.where(better, score, best)
        best_id = tl.where(better, ids, best_id)
    top = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == top, best_id, vocab_size - 1), axis=0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + at, top)
    tl.store(ids_ptr + at, first_id + winner)


@triton.jit(do_not_specialize=["num_pieces"])
def _first_best_kernel(  # type: ignore[no-untyped-def]
    best_ptr, ids_ptr, out_ptr, num_pieces, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program finds the first best piece of one row."""
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    inside = n < num_pieces
    best = tl.load(best_ptr + row * num_pieces + n, mask=inside, other=-float("inf"))
    ids = tl.load(ids_ptr + row * num_pieces + n, mask=inside, other=2147483647)
    top = tl.max(best, axis=0)
    tl.store(out_ptr + row, tl.min(tl.where(best == top, ids, 2147483647), axis=0).to(tl.int64))


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    keys: torch.Tensor | None,
    masks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Token ids [B] for logits [B, V], as the twin defines them. Reads the logits once."""
    best, ids = race_pieces(logits, temperatures, keys, masks=masks)
    num_rows, pieces = best.shape
    out = logits.new_empty(num_rows, dtype=torch.int64)
    largest = most_pieces(logits.shape[1])
    _first_best_kernel[(num_rows,)](
        best, ids, out, pieces, BLOCK=next_power_of_2(largest), num_warps=1
    )
    return out


def most_pieces(vocab_size: int) -> int:
    """Into how many pieces a row is divided at most, whatever the number of rows."""
    return min(PROGRAMS, max(1, cdiv(vocab_size, BLOCK)))


def race_pieces(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    keys: torch.Tensor | None,
    first_id: int = 0,
    masks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best score and its first token, of each piece of each row: [B, pieces] both.

    The first column is that of token `first_id`.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    row_blocks = max(1, cdiv(vocab_size, BLOCK))
    blocks = cdiv(row_blocks, min(row_blocks, max(1, PROGRAMS // num_rows)))
    pieces = cdiv(row_blocks, blocks)
    best = logits.new_empty(num_rows, pieces, dtype=torch.float32)
    ids = logits.new_empty(num_rows, pieces, dtype=torch.int32)
    race, masked = temperatures is not None and keys is not None, masks is not None
    assert masks is None or masks.stride(1) == 1
    _sample_kernel[(num_rows, pieces)](
        logits, temperatures if race else logits, keys if race else logits,
        logits if masks is None else masks, best, ids, logits.stride(0),
        0 if masks is None else masks.stride(0), vocab_size, blocks, first_id,
        RACE=race, MASKED=masked, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return best, ids
