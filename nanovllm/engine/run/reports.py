"""Reports: the log-probabilities that sequences wait for, and their delivery."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.engine.run.computed import REPORTED
from nanovllm.engine.run.transfer import Array
from nanovllm.engine.schedule.sequence import Sequence


class Columns(NamedTuple):
    """Token ids, log-probabilities and ranks, [R, 1 + K] each: the row's own token, then others."""

    token_ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor


class Report(NamedTuple):
    """A sequence that waits for log-probabilities of a token and of `number` others."""

    seq: Sequence
    position: int  # of the token in `token_ids`, or of the label in the keeper's labels
    number: int


@dataclass(frozen=True, slots=True)
class ReportInputs:
    """The samples of a step with reports, on the host."""

    rows: Array
    numbers: list[int]  # how many of the most likely tokens, for each row
    mode: str  # the engine's `logprobs_mode`


def scheduled_of(seq: Sequence, tokens: range) -> range:
    """The part of `tokens` that the step in progress computes."""
    start, end = seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens
    return range(max(start, tokens.start), min(end, tokens.stop))


def unreported_indices(seq: Sequence) -> Iterable[int]:
    """Scheduled tokens with logits that give log-probabilities of the prompt's next tokens.

    If the sequence generates nothing: the last token, once for each label.
    """
    logprobs, keeper = seq.parts.logprobs, seq.parts.keeper
    if not seq.generates:
        return [*scheduled_of(seq, keeper.wanted)] * len(keeper.labels)
    return () if logprobs is None else scheduled_of(seq, logprobs.wanted)


def prompt_reports(seqs: list[Sequence]) -> list[Report]:
    """The prompt tokens that a prefill reports, in the order of the sequences."""
    return [
        Report(seq, index + 1 if seq.generates else place, seq.params.prompt_logprobs or 0)
        for seq in seqs
        for place, index in enumerate(unreported_indices(seq))
    ]


def report_arrays(seqs: list[Sequence], starts: Array) -> dict[str, Array]:
    """The tokens of a prefill with reports, the ids to report, and how many others of each.

    The tokens of each sequence begin at `starts`.
    """
    reports = prompt_reports(seqs)
    if not reports:
        return {}
    tokens = [
        start + index - seq.num_cached_tokens
        for seq, start in zip(seqs, starts.tolist(), strict=False)
        for index in unreported_indices(seq)
    ]
    ids = [(s.token_ids if s.generates else s.parts.keeper.labels)[i] for s, i, _ in reports]
    numbers = [number for _, _, number in reports]
    named = {REPORTED: tokens, "reported_ids": ids, "reported_numbers": numbers}
    as_logits = [s.generates and s.parts.logprobs.mode.endswith("logits") for s, _, _ in reports]
    if any(as_logits):
        named["reported_as_logits"] = as_logits
    return {name: np.array(values, np.int64) for name, values in named.items()}


def drawn_report_inputs(seqs: list[Sequence], rows: list[int]) -> ReportInputs:
    """The samples at `rows`, of sequences that report their next token."""
    numbers = [seqs[row].params.logprobs or 0 for row in rows]
    return ReportInputs(np.array(rows), numbers, seqs[rows[0]].parts.logprobs.mode)


def drawn_reports(seqs: list[Sequence], offsets: list[int], inputs: ReportInputs) -> list[Report]:
    """The reports of these rows, on the sequences' next tokens, which are not yet appended."""
    rows = zip(inputs.rows.tolist(), inputs.numbers, strict=True)
    return [Report(seqs[row], seqs[row].num_tokens + offsets[row], number) for row, number in rows]


def deliver(reports: list[Report], columns: tuple[Columns, ...]) -> None:
    """Give the columns, which have arrived on the host, to the sequences that asked."""
    rows = (row for part in columns for row in zip(*(x.tolist() for x in part), strict=True))
    for (seq, position, number), (ids, values, ranks) in zip(reports, rows, strict=True):
        own, *others = zip(ids, values, ranks, strict=True)
        likely = (own, *(token for token in others[:number] if token[0] != own[0]))
        (seq.parts.logprobs if seq.generates else seq.parts.keeper).add(seq, position, likely)
