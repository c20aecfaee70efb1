"""Log-probabilities of the model's logits, in float32: of the drawn tokens and of prompts' tokens.

The device computes columns of them, which are copied to the host while it goes on; `Launched`
gives them to the sequences that asked.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step.transfer import Array, download, upload
from nanovllm.kernels.plain.ranking import most_likely

MAX_LOGITS = 1 << 23  # at a time: each takes some 50 bytes


class Columns(NamedTuple):
    """Token ids, log-probabilities and ranks, [R, 1 + K] each: the row's own token, then others."""

    token_ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor


class Report(NamedTuple):
    """A sequence that waits for log-probabilities: of its token at `place`, and `number` others."""

    seq: Sequence
    place: int
    number: int


@dataclass(frozen=True, slots=True)
class ReportInputs:
    """Rows of a step's logits whose log-probabilities are reported, on the host.

    `token_ids` are the tokens in question; None stands for those that the step draws.
    """

    rows: Array
    numbers: list[int]  # of the most likely tokens, for each row
    token_ids: Array | None = None


def prompt_reports(seqs: list[Sequence]) -> list[Report]:
    """The prompt tokens that a prefill reports, in the order of its `prompt_rows`."""
    return [
        Report(seq, place + 1, seq.params.prompt_logprobs or 0)
        for seq in seqs
        for place in seq.unreported_places
    ]


def prompt_report_inputs(reports: list[Report]) -> ReportInputs | None:
    """What rank 0 needs to know of the rows in `prompt_rows`; None if there are none."""
    if not reports:
        return None
    token_ids = np.array([seq.token_ids[place] for seq, place, _ in reports])
    numbers = [number for _, _, number in reports]
    return ReportInputs(np.arange(len(reports)), numbers, token_ids)


def drawn_report_inputs(seqs: list[Sequence]) -> ReportInputs | None:
    """The rows of sequences that report their next token; None if there are none."""
    followed = [row for row, seq in enumerate(seqs) if seq.logprobs is not None]
    rows = [row for row in followed if seqs[row].params.logprobs is not None]
    if not rows:
        return None
    return ReportInputs(np.array(rows), [seqs[row].params.logprobs or 0 for row in rows])


def drawn_reports(seqs: list[Sequence], inputs: ReportInputs | None) -> list[Report]:
    """The sequences that wait for these rows; their next tokens are not yet appended."""
    if inputs is None:
        return []
    rows = zip(inputs.rows.tolist(), inputs.numbers, strict=True)
    return [Report(seqs[row], seqs[row].num_tokens, number) for row, number in rows]


def deliver(reports: list[Report], columns: tuple[Columns, ...]) -> None:
    """Give the columns, which have arrived on the host, to the sequences that asked."""
    if not reports:
        return
    rows = (row for part in columns for row in zip(*(x.tolist() for x in part), strict=True))
    for (seq, place, number), (ids, values, ranks) in zip(reports, rows, strict=True):
        own, *others = zip(ids, values, ranks, strict=True)
        likely = [own, *(token for token in others[:number] if token[0] != own[0])]
        seq.logprobs.add(seq, place, likely)


def rows_at_a_time(vocab_size: int) -> int:
    """How many rows are computed together."""
    return max(1, MAX_LOGITS // vocab_size)


def warm_up_logprobs(logits: torch.Tensor) -> None:
    """Take the most device memory that reports on logits [B, V] take: all tokens in order."""
    likely_columns(logits, logits.new_zeros(len(logits), dtype=torch.long), logits.shape[1])


def drawn_columns(
    logits: torch.Tensor, token_ids: torch.Tensor, inputs: ReportInputs
) -> tuple[Columns, ...]:
    """The columns of drawn tokens [B] from logits [B, V], a few rows at a time, in flight."""
    columns = []
    size = rows_at_a_time(logits.shape[1])
    for start in range(0, len(inputs.rows), size):
        rows = upload(inputs.rows[start : start + size], logits.device)
        number = max(inputs.numbers[start : start + size])
        columns.append(download_columns(likely_columns(logits[rows], token_ids[rows], number)))
    return tuple(columns)


def prompt_columns(logits: torch.Tensor, inputs: ReportInputs, start: int) -> Columns:
    """The columns, in flight, of the prompt tokens from `start` on, one for each row of logits."""
    assert inputs.token_ids is not None
    part = slice(start, start + len(logits))
    chosen = upload(inputs.token_ids[part], logits.device)
    return download_columns(likely_columns(logits, chosen, max(inputs.numbers[part])))


def download_columns(columns: Columns) -> Columns:
    """Copies on the host, in flight."""
    return Columns(*map(download, columns))


def likely_columns(logits: torch.Tensor, chosen: torch.Tensor, number: int) -> Columns:
    """The tokens `chosen` [B], and behind each the `number` most likely ones."""
    logprobs = logits.float().log_softmax(dim=1)
    values, ids = most_likely(logprobs, number)
    own = logprobs.gather(1, chosen[:, None])
    ranks = (logprobs > own).sum(dim=1, keepdim=True)
    if number:  # equal values share the rank of the first of them, the place where the value begins
        begins = F.pad(values[:, 1:] != values[:, :-1], (1, 0), value=True)
        places = torch.arange(number, device=ids.device).expand_as(ids)
        first = (places * begins).cummax(dim=1).values
        ranks = torch.cat([ranks, first], dim=1)
    ids, values = torch.cat([chosen[:, None], ids], dim=1), torch.cat([own, values], dim=1)
    return Columns(ids, values, ranks + 1)
