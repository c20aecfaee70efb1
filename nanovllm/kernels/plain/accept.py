"""Accepting drafts: the last part of a decode step with several queries for each row.

A draft is right if it equals the token that was drawn at its position. The token after the row's
last token counts, and so do the tokens that were drawn after right drafts.
"""

import torch

from nanovllm.kernels.plain.read_table import CHANCE_BITS, Decoding, TableState


def accept(
    table: TableState, decoding: Decoding, token_ids: torch.Tensor, num_queries: int
) -> torch.Tensor:
    """Add the tokens that count to their rows; returns [B, 2 + num_queries] in int64.

    The columns are the number of tokens that count, the number of drafts, and all tokens.
    `token_ids` [B * num_queries] were drawn for the queries of `decoding`. If no token could be
    drawn, an id is below 0, and the row gets 0. A row gets nothing if its first query was not used.
    Another call for the same step replaces the accepted tokens.
    """
    drawn = token_ids.view(-1, num_queries)
    rows = table.batch[: len(drawn)].long()
    lens, keys = (x[: drawn.numel()].view_as(drawn) for x in (decoding.context_lens, decoding.keys))
    used, guessed = lens[:, 0] > 0, lens[:, 1:] > 0
    drafts = table.drafts.tokens[rows, : num_queries - 1].long()
    by_chance = (keys[:, :-1] >> CHANCE_BITS) % (1 << CHANCE_BITS) < table.drafts.chance
    drawn = torch.cat([drafts.where(by_chance & guessed, drawn[:, :-1]), drawn[:, -1:]], dim=1)
    right = (drawn[:, :-1] == drafts) & guessed
    counts = (1 + right.cumprod(1).sum(1)) * used
    outcome = torch.cat([counts[:, None], guessed.sum(1, keepdim=True), drawn], dim=1)
    rows, drawn, counts, lens = (x[used] for x in (rows, drawn.clamp(min=0), counts, lens))
    table.tokens[rows] = drawn.gather(1, counts[:, None] - 1).squeeze(1)
    table.lengths[rows] = lens[:, 0] - 1 + counts.int()
    table.drafts.counts[rows] = counts.int()
    table.drafts.recent[rows, :num_queries] = drawn.int()
    return outcome
