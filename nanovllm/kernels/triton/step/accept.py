"""Accepting drafts: the last kernel of a decode graph with several queries for each row."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.plain.read_table import CHANCE_BITS, Decoding, TableState


@triton.jit
def _accept_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr, lengths_ptr, batch_ptr, drafts_ptr, counts_ptr, recent_ptr, chance_ptr,
    context_lens_ptr, keys_ptr, drawn_ptr, out_ptr, most_drafts,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr, CHANCE_BITS: tl.constexpr,
):  # fmt: skip
    """One program for each row of the batch."""
    place = tl.program_id(0)
    row = tl.load(batch_ptr + place).to(tl.int64)
    query = tl.arange(0, BLOCK)
    at = place * QUERIES + query
    inside, is_judged = query < QUERIES, query < QUERIES - 1
    length = tl.load(context_lens_ptr + place * QUERIES)
    guessed = tl.load(context_lens_ptr + at + 1, mask=is_judged, other=0) > 0
    draft = tl.load(drafts_ptr + row * most_drafts + query, mask=is_judged, other=-1).to(tl.int64)
    drawn = tl.load(drawn_ptr + at, mask=inside, other=0)
    key = tl.load(keys_ptr + at, mask=inside, other=0)
    by_chance = ((key >> CHANCE_BITS) & ((1 << CHANCE_BITS) - 1)) < tl.load(chance_ptr)
    drawn = tl.where(by_chance & guessed, draft, drawn)
    is_wrong = (drawn != draft) | (guessed == 0)
    count = tl.min(tl.where(is_wrong, query, QUERIES - 1), axis=0) + 1
    used = length > 0
    count = tl.where(used, count, 0)
    out_ptr += place * (QUERIES + 2)
    tl.store(out_ptr, count.to(tl.int64))
    tl.store(out_ptr + 1, tl.sum(guessed.to(tl.int64), axis=0))
    tl.store(out_ptr + 2 + query, drawn, mask=inside)
    drawn = tl.maximum(drawn, 0)
    last = tl.sum(tl.where(query == count - 1, drawn, 0), axis=0)
    tl.store(tokens_ptr + row, last, mask=used)
    tl.store(lengths_ptr + row, length - 1 + count, mask=used)
    tl.store(counts_ptr + row, count, mask=used)
    recent_ptr += row * (most_drafts + 1)
    tl.store(recent_ptr + query, drawn.to(tl.int32), mask=inside & used)


def accept(
    table: TableState, decoding: Decoding, token_ids: torch.Tensor, num_queries: int
) -> torch.Tensor:
    """Add the tokens that count to their rows; returns [B, 2 + num_queries] in int64.

    The columns are the number of tokens that count, the number of drafts, and all tokens.
    """
    num_rows, state = len(token_ids) // num_queries, table.drafts
    out = token_ids.new_empty(num_rows, 2 + num_queries)
    assert state.tokens.stride(0) == state.recent.stride(0) - 1 >= num_queries - 1
    _accept_kernel[(num_rows,)](
        table.tokens, table.lengths, table.batch, state.tokens, state.counts, state.recent,
        state.chance, decoding.context_lens, decoding.keys, token_ids, out, state.tokens.stride(0),
        QUERIES=num_queries, BLOCK=triton.next_power_of_2(num_queries), CHANCE_BITS=CHANCE_BITS,
        num_warps=1,
    )  # fmt: skip
    return out
