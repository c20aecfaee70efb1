"""Guess drafts by n-grams: the tokens after an earlier occurrence of a row's last tokens."""

import torch

from nanovllm.kernels.plain.read_table import NO_DRAFT, TableState


def guess_ngrams(
    table: TableState, num_rows: int, num_drafts: int, shortest: int, longest: int
) -> None:
    """Write drafts for the first rows of the batch.

    The drafts are the tokens after the latest earlier occurrence of the longest n-gram that ends
    the row. If they reach the end of the row's tokens, they repeat themselves. The row's recent
    tokens are first added to its history. If drafts are accepted by chance (for measurements), each
    row gets drafts: without an n-gram, copies of its last token.
    """
    state = table.drafts
    for row in table.batch[:num_rows].tolist():
        last = int(table.lengths[row])
        if last < 0:
            continue
        token_ids, count = state.history[row], int(state.counts[row])
        token_ids[last - count + 1 : last] = state.recent[row, : count - 1]
        token_ids[last] = table.tokens[row]
        end = _end_of_match(token_ids[: last + 1].tolist(), shortest, longest)
        if end:
            where = end + torch.arange(num_drafts) % (last + 1 - end)
            state.tokens[row, :num_drafts] = token_ids[where]
        else:
            state.tokens[row, :num_drafts] = token_ids[last] if state.chance else NO_DRAFT


def _end_of_match(token_ids: list[int], shortest: int, longest: int) -> int:
    """Where the longest of the n-grams ended earlier; 0 if none of them occurred."""
    for n in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        for end in range(len(token_ids) - 1, n - 1, -1):
            if token_ids[end - n : end] == token_ids[-n:]:
                return end
    return 0
