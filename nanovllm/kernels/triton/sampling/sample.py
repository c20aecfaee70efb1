"""Sample tokens in one pass over the logits, for greedy and temperature rows together.

B rows, V tokens. A row is divided into pieces. One kernel finds the winner of the race in each
piece, and a second kernel the winner of all pieces.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.triton.sampling.candidates import largest_of
from nanovllm.kernels.triton.sampling.infinite import INFINITE, checked, is_odd
from nanovllm.kernels.triton.sampling.mask import WORD, are_allowed, load_words
from nanovllm.kernels.triton.sampling.noise import log_exponential

BLOCK = 1024  # tokens that a program reads at a time
PROGRAMS = 4096  # about the number of programs: a few rows, in pieces, also fill the device


@triton.jit
def _num_infinite(row_ptr, start, end, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many logits from `start` to `end` are infinite."""
    number = tl.zeros([BLOCK], tl.int32)
    for first in range(start, end, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        number += is_odd(tl.load(row_ptr + ids, mask=ids < end, other=0.0).to(tl.float32))
    return tl.sum(number, axis=0)


@triton.jit
def _num_allowed(  # type: ignore[no-untyped-def]
    row_ptr, bitmap_ptr, start, end, vocab_size, WORDS: tl.constexpr
):
    """How many logits of allowed tokens from `start` to `end` are infinite."""
    n = tl.arange(0, WORDS)[:, None] * WORD + tl.arange(0, WORD)[None, :]
    number = tl.zeros([WORDS, WORD], tl.int32)
    for first in range(start, end, WORDS * WORD):
        ids = first + n
        x = tl.load(row_ptr + ids, mask=ids < end, other=0.0).to(tl.float32)
        allowed = are_allowed(load_words(bitmap_ptr, first, vocab_size, WORDS))
        number += is_odd(tl.where(allowed, x, 0.0))
    return tl.sum(tl.sum(number, axis=1), axis=0)


@triton.jit(do_not_specialize=["blocks"])
def _sample_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, temperatures_ptr, keys_ptr, best_ptr, ids_ptr, logits_stride, vocab_size, blocks,
    first_id, RACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program finds the first best token of one piece of one row: `blocks` blocks.

    The first column belongs to the token `first_id`.
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
        score = tl.load(at, mask=ids < end, other=-float("inf")).to(tl.float32)
        if RACE:  # noqa: SIM102
            if temperature > 0:
                score = score - temperature * log_exponential(key, first_id + ids)
        best_id = tl.where(score > best, ids, best_id)
        best = tl.maximum(best, score, propagate_nan=tl.PropagateNan.ALL)
    top = largest_of(best, best)
    if top == INFINITE:  # rare
        row_ptr = logits_ptr + row * logits_stride
        top = checked(top, _num_infinite(row_ptr, start, end, BLOCK))
    winner = tl.min(tl.where(best == top, best_id, vocab_size - 1), axis=0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + at, top)
    tl.store(ids_ptr + at, first_id + winner)


@triton.jit(do_not_specialize=["blocks"])
def _sample_masked_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, temperatures_ptr, keys_ptr, rows_ptr, bitmaps_ptr, best_ptr, ids_ptr,
    logits_stride, bitmaps_stride, vocab_size, blocks, RACE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """As `_sample_kernel`, for the row at `rows_ptr` and its allowed tokens: blocks of WORDS words.

    A block without allowed tokens is not read, and neither is a row of -1.
    """
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index)
    start = tl.program_id(1) * blocks * WORDS * WORD
    end = tl.minimum(start + blocks * WORDS * WORD, vocab_size)
    end = tl.where(row < 0, start, end)
    n = tl.arange(0, WORDS)[:, None] * WORD + tl.arange(0, WORD)[None, :]
    best = tl.full([WORDS, WORD], -float("inf"), tl.float32)
    best_id = tl.minimum(start + n, vocab_size - 1)
    if RACE:
        temperature = tl.load(temperatures_ptr + row, mask=row >= 0)
        key = tl.load(keys_ptr + row, mask=row >= 0)
    for first in range(start, end, WORDS * WORD):
        words = load_words(bitmaps_ptr + index * bitmaps_stride, first, vocab_size, WORDS)
        if tl.max((words != 0).to(tl.int32), axis=0) > 0:
            ids = first + n
            at = logits_ptr + row * logits_stride + ids
            score = tl.load(at, mask=ids < end, other=-float("inf")).to(tl.float32)
            score = tl.where(are_allowed(words), score, -float("inf"))
            if RACE:  # noqa: SIM102
                if temperature > 0:
                    score = score - temperature * log_exponential(key, ids)
            best_id = tl.where(score > best, ids, best_id)
            best = tl.maximum(best, score, propagate_nan=tl.PropagateNan.ALL)
    largest = largest_of(tl.trans(best), tl.trans(best))
    top = largest_of(largest, largest)
    if top == INFINITE:  # rare
        row_ptr, words_ptr = logits_ptr + row * logits_stride, bitmaps_ptr + index * bitmaps_stride
        top = checked(top, _num_allowed(row_ptr, words_ptr, start, end, vocab_size, WORDS))
    tied = tl.where(best == top, best_id, vocab_size - 1)
    at = index * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + at, top)
    tl.store(ids_ptr + at, tl.min(tl.min(tied, axis=1), axis=0))


@triton.jit(do_not_specialize=["num_pieces"])
def _first_best_kernel(  # type: ignore[no-untyped-def]
    best_ptr, ids_ptr, rows_ptr, out_ptr, num_pieces, CHOSEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program finds the first best piece of one row; CHOSEN: of a row in `rows_ptr`.

    A chosen row of -1 gets no token.
    """
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    inside = n < num_pieces
    best = tl.load(best_ptr + row * num_pieces + n, mask=inside, other=-float("inf"))
    ids = tl.load(ids_ptr + row * num_pieces + n, mask=inside, other=2147483647)
    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, ids, 2147483647), axis=0).to(tl.int64)
    top = checked(top, tl.sum(is_odd(best), axis=0))
    token = tl.where(top > -float("inf"), token, -1)
    to = tl.load(rows_ptr + row) if CHOSEN else row
    tl.store(out_ptr + to, token, mask=to >= 0)


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor | None, keys: torch.Tensor | None
) -> torch.Tensor:
    """Token ids [B] for logits [B, V], as `plain/sample.py` defines them. Reads logits once."""
    best, ids = race_pieces(logits, temperatures, keys)
    out = logits.new_empty(len(logits), dtype=torch.int64)
    _keep_first_best(best, ids, None, out, logits.shape[1])
    return out


def sample_masked(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    keys: torch.Tensor | None,
    rows: torch.Tensor,
    bitmaps: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    """Write the token ids of the rows `rows` to `token_ids`, as `plain/mask.py` defines them.

    Copies nothing, and reads only logits near allowed tokens.
    """
    num_rows, vocab_size = len(rows), logits.shape[1]
    assert logits.stride(1) == 1 and bitmaps.stride(1) == 1
    best, ids, blocks = _new_pieces(logits, num_rows)
    race = temperatures is not None and keys is not None
    _sample_masked_kernel[best.shape](
        logits, temperatures if race else logits, keys if race else logits, rows, bitmaps,
        best, ids, logits.stride(0), bitmaps.stride(0), vocab_size, blocks, RACE=race,
        WORDS=BLOCK // 32, num_warps=4,
    )  # fmt: skip
    _keep_first_best(best, ids, rows, token_ids, vocab_size)


def _keep_first_best(
    best: torch.Tensor,
    ids: torch.Tensor,
    rows: torch.Tensor | None,
    out: torch.Tensor,
    vocab_size: int,
) -> None:
    """Write the first best piece's token of each row to `out`, or to its elements `rows`."""
    num_rows, pieces = best.shape
    _first_best_kernel[(num_rows,)](
        best, ids, out if rows is None else rows, out, pieces, CHOSEN=rows is not None,
        BLOCK=next_power_of_2(most_pieces(vocab_size)), num_warps=1,
    )  # fmt: skip


def most_pieces(vocab_size: int) -> int:
    """The most pieces into which a row is divided, for any number of rows."""
    return min(PROGRAMS, max(1, cdiv(vocab_size, BLOCK)))


def race_pieces(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    keys: torch.Tensor | None,
    first_id: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best score and its first token for each piece of each row: both [B, pieces].

    The score is NaN if it is not the only best one: some are NaN, or several are infinite.

    The first column belongs to the token `first_id`.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    best, ids, blocks = _new_pieces(logits, num_rows)
    race = temperatures is not None and keys is not None
    _sample_kernel[best.shape](
        logits, temperatures if race else logits, keys if race else logits, best, ids,
        logits.stride(0), vocab_size, blocks, first_id, RACE=race, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return best, ids


def _new_pieces(logits: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Allocate the best score and token of each piece; also return the blocks of a piece."""
    row_blocks = max(1, cdiv(logits.shape[1], BLOCK))
    blocks = cdiv(row_blocks, min(row_blocks, max(1, PROGRAMS // num_rows)))
    pieces = cdiv(row_blocks, blocks)
    best = logits.new_empty(num_rows, pieces, dtype=torch.float32)
    return best, logits.new_empty(num_rows, pieces, dtype=torch.int32), blocks
