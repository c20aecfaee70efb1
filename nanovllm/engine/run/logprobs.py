"""Log-probabilities of the model's logits, in float32: of the drawn tokens and of prompts' tokens.

The device computes columns of them, which are copied to the host while it goes on.
"""

import numpy as np
import torch
import torch.nn.functional as F

from nanovllm.engine.run.reports import (
    Columns,
    ReportInputs,
    prompt_reports,
    unreported_indices,
)
from nanovllm.engine.run.step_inputs import StepInputs
from nanovllm.engine.run.step_part import ComputeLogits, StepPart
from nanovllm.engine.run.transfer import Array, download, upload
from nanovllm.engine.schedule.batch import Batch
from nanovllm.kernels.plain.ranking import most_likely

MAX_LOGITS = 1 << 23  # at a time: each takes some 50 bytes


class PromptReports(StepPart):
    """Reports on prompts: the tokens [R] with reports, their ids, and how many others each has.

    All ranks compute the logits, a few rows at a time; `is_first` is for rank 0, which reports.
    """

    name = "prompt_reports"

    def __init__(self, vocab_size: int, is_first: bool) -> None:
        self._num_rows, self._is_first = rows_at_a_time(vocab_size), is_first

    def arrays(self, batch: Batch, q_ends: Array | None) -> dict[str, Array]:
        """Which tokens of a prefill have reports, and what is reported of each."""
        if q_ends is None or not (reports := prompt_reports(batch.seqs)):
            return {}
        starts = zip(batch.seqs, q_ends.tolist(), strict=False)
        tokens = [
            start + index - seq.num_cached_tokens
            for seq, start in starts
            for index in unreported_indices(seq)
        ]
        ids = [(s.token_ids if s.generates else s.parts.keeper.labels)[i] for s, i, _ in reports]
        numbers = [number for _, _, number in reports]
        named = {"reported_tokens": tokens, "reported_ids": ids, "reported_numbers": numbers}
        return {name: np.array(values, np.int64) for name, values in named.items()}

    def tokens(self, inputs: StepInputs) -> Array | None:
        """The tokens with reports."""
        return inputs.arrays.get("reported_tokens")

    def take(
        self, hidden: torch.Tensor, inputs: StepInputs, compute_logits: ComputeLogits
    ) -> tuple[Columns, ...]:
        """The columns of the reports, in flight; on other ranks than the first there are none."""
        arrays, columns = inputs.arrays, []
        for start in range(0, len(hidden), self._num_rows):
            part = slice(start, start + self._num_rows)
            logits = compute_logits(hidden[part], arrays["reported_tokens"][part])
            if self._is_first:
                chosen = upload(arrays["reported_ids"][part], logits.device)
                number = int(arrays["reported_numbers"][part].max())
                columns.append(download_columns(likely_columns(logits, chosen, number)))
        return tuple(columns)


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


def download_columns(columns: Columns) -> Columns:
    """Copies on the host, in flight."""
    return Columns(*map(download, columns))


def likely_columns(logits: torch.Tensor, chosen: torch.Tensor, number: int) -> Columns:
    """The tokens `chosen` [B], and after each the `number` most likely ones."""
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
