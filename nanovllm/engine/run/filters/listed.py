"""Filters by lists of tokens: those that are allowed alone, and those that are forbidden."""

from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.engine.requests.bad_words import TokenSet
from nanovllm.engine.run.filters.entries import (
    IdsOfRows,
    Row,
    allowed_entries,
    forbidden_entries,
    stop_ids,
)
from nanovllm.engine.run.transfer import Array
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.layers.filters import FORBIDDEN, Entries

NONE = np.array((), np.int64)


@dataclass(slots=True)
class AllowedIds:
    """Rows that have a list of allowed tokens, and their lists."""

    rows: torch.Tensor
    entries: Entries

    def apply(self, logits: torch.Tensor) -> None:
        """Forbid all tokens of these rows that are not in the lists."""
        kept = logits[self.entries]
        logits.index_fill_(0, self.rows, FORBIDDEN)
        logits[self.entries] = kept


@dataclass(slots=True)
class ForbiddenIds:
    """The tokens that rows forbid."""

    entries: Entries

    def apply(self, logits: torch.Tensor) -> None:
        """Forbid them."""
        logits.index_put_(self.entries, logits.new_full((), FORBIDDEN))


def allowed_ids(rows: list[Row], num_rows: int) -> AllowedIds | None:  # noqa: ARG001
    """What `allowed_token_ids` allow."""
    allowed = [(row, seq.params) for row, seq, _ in rows if seq.params.allowed_token_ids]
    return AllowedIds(*allowed_entries(allowed)) if allowed else None


def forbidden_ids(rows: list[Row], num_rows: int) -> ForbiddenIds | None:  # noqa: ARG001
    """What bad words forbid, and stop tokens before `min_tokens`."""
    forbidden = forbidden_of(rows)
    return ForbiddenIds(forbidden_entries(forbidden)) if forbidden else None


def allowed_of(rows: list[Row]) -> IdsOfRows:
    """Rows that have a list of allowed tokens, each with its list."""
    return [(row, ids) for row, seq, _ in rows if (ids := seq.params.allowed_token_ids)]


def forbidden_of(rows: list[Row]) -> IdsOfRows:
    """Rows that forbid tokens, each with these."""
    return [
        (row, ids)
        for row, seq, assumed in rows
        if may_forbid(seq) and len(ids := _forbidden(seq, assumed))
    ]


def may_forbid(seq: Sequence) -> bool:
    """Whether `forbidden_tokens` may return tokens; otherwise it need not be called."""
    return seq.parts.bad_words is not None or len(seq.token_ids) < seq.min_num_tokens


def forbidden_tokens(seq: Sequence, assumed: list[int]) -> list[TokenSet]:
    """The tokens that may not come after the `assumed` ones, or next if there are none.

    They are the last tokens of bad words, and all stop tokens before `min_tokens`. Bad words are
    looked for in the output alone, not in the prompt.
    """
    num_tokens, bad_words = len(seq.token_ids) + len(assumed), seq.parts.bad_words
    found = []
    if num_tokens < seq.min_num_tokens:
        found.append(TokenSet(seq.stop_token_ids, stop_ids(seq)))
    if bad_words is not None:
        start = len(seq.token_ids) - bad_words.longest
        output = seq.token_ids[max(start, seq.num_prompt_tokens) :] + assumed  # its last tokens
        found += bad_words.after(output)
    return found


def _forbidden(seq: Sequence, assumed: list[int]) -> Array:
    """A sequence's forbidden tokens; none if all of the allowed ones would be forbidden."""
    found, allowed = forbidden_tokens(seq, assumed), seq.params.allowed_token_ids
    if allowed and all(any(i in some.ids for some in found) for i in allowed):
        return NONE
    if len(found) == 1:
        return found[0].array
    return np.concatenate([NONE, *(some.array for some in found)])
