"""Filters by lists of tokens: those that are allowed alone, and those that are forbidden."""

from dataclasses import dataclass

import torch

from nanovllm.engine.run.filters.entries import (
    IdsOfRows,
    Row,
    allowed_entries,
    forbidden_entries,
)
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.layers.filters import FORBIDDEN, Entries


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
        if may_forbid(seq) and (ids := _forbidden(seq, assumed))
    ]


def may_forbid(seq: Sequence) -> bool:
    """Whether `forbidden_token_ids` may return tokens; otherwise it need not be called."""
    return bool(seq.parts.bad_words) or len(seq.token_ids) < seq.min_num_tokens


def forbidden_token_ids(seq: Sequence, assumed: list[int]) -> set[int]:
    """The tokens that may not come after the `assumed` ones, or next if there are none.

    They are the last tokens of bad words, and all stop tokens before `min_tokens`. Bad words are
    looked for in the output alone, not in the prompt.
    """
    num_tokens, bad_words = len(seq.token_ids) + len(assumed), seq.parts.bad_words
    forbidden = set(seq.stop_token_ids) if num_tokens < seq.min_num_tokens else set()
    if not bad_words:
        return forbidden
    start = len(seq.token_ids) - max(map(len, bad_words))
    output = seq.token_ids[max(start, seq.num_prompt_tokens) :] + assumed  # its last tokens
    for *before, last in bad_words:
        if output[len(output) - len(before) :] == before:
            forbidden.add(last)
    return forbidden


def _forbidden(seq: Sequence, assumed: list[int]) -> set[int]:
    """A sequence's forbidden tokens; none if all of the allowed ones would be forbidden."""
    forbidden, allowed = forbidden_token_ids(seq, assumed), seq.params.allowed_token_ids
    return set() if allowed and all(map(forbidden.__contains__, allowed)) else forbidden
