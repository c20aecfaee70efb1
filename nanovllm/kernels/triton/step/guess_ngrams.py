"""Guess drafts by n-grams: the first kernel of a decode graph that verifies them."""

import triton
import triton.language as tl

from nanovllm.kernels.plain.read_table import NO_DRAFT, TableState

BLOCK = 1024  # places that a program compares at a time
PLACES = tl.constexpr(1 << 25)  # more places than any sequence has


@triton.jit(do_not_specialize=["width", "most_drafts"])
def _guess_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr, lengths_ptr, batch_ptr, drafts_ptr, counts_ptr, recent_ptr, history_ptr, chance_ptr,
    width, most_drafts, num_drafts,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr, NO_DRAFT: tl.constexpr,
    BLOCK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One program for each row of the batch. A match's score is its length, then its place."""
    row = tl.load(batch_ptr + tl.program_id(0)).to(tl.int64)
    last = tl.load(lengths_ptr + row)
    if last < 0:
        return
    history_ptr += row * width
    drafts_ptr += row * most_drafts
    count = tl.load(counts_ptr + row)
    index = tl.arange(0, MOST)
    recent = tl.load(recent_ptr + row * (most_drafts + 1) + index, mask=index < count - 1, other=0)
    tl.store(history_ptr + last - count + 1 + index, recent, mask=index < count - 1)
    last_token = tl.load(tokens_ptr + row).to(tl.int32)
    tl.store(history_ptr + last, last_token)
    tl.debug_barrier()
    best = tl.zeros([BLOCK], tl.int32)
    for start in range(0, last, BLOCK):
        place = start + tl.arange(0, BLOCK)
        same = place < last
        length = tl.zeros([BLOCK], tl.int32)
        for back in tl.static_range(LONGEST):
            sought = tl.load(history_ptr + tl.maximum(last - back, 0))
            same = same & (place >= back)
            same = same & (tl.load(history_ptr + place - back, mask=same, other=-2) == sought)
            length += same.to(tl.int32)
        score = length * PLACES + place
        best = tl.maximum(best, tl.where(length >= SHORTEST, score, 0))
    found = tl.max(best, axis=0)
    end = found % PLACES + 1
    where = end + index % tl.maximum(last + 1 - end, 1)
    is_draft = index < num_drafts
    draft = tl.load(history_ptr + where, mask=is_draft & (found > 0), other=NO_DRAFT)
    if tl.load(chance_ptr) > 0:
        draft = tl.where(found > 0, draft, last_token)
    tl.store(drafts_ptr + index, draft, mask=is_draft)


def guess_ngrams(
    table: TableState, num_rows: int, num_drafts: int, shortest: int, longest: int
) -> None:
    """Write drafts for the first rows of the batch.

    Reads a row's history `longest` times, all except the first from the GPU's cache.
    """
    state = table.drafts
    assert state.history.shape[1] < PLACES.value and longest < 64
    _guess_kernel[(num_rows,)](
        table.tokens, table.lengths, table.batch, state.tokens, state.counts, state.recent,
        state.history, state.chance, state.history.stride(0), state.tokens.stride(0), num_drafts,
        SHORTEST=shortest, LONGEST=longest, NO_DRAFT=NO_DRAFT, BLOCK=BLOCK,
        MOST=triton.next_power_of_2(state.recent.shape[1]),
    )  # fmt: skip
