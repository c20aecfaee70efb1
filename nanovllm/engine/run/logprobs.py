"""Log-probabilities by the model's logits, in float32: of the drawn tokens and of prompts' tokens.

The device computes columns of log-probabilities, which are copied to the host while it goes on.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from nanovllm.engine.run.computed import REPORTED, Computed, ComputeLogits
from nanovllm.engine.run.draw_inputs import DrawInputs
from nanovllm.engine.run.reports import Columns
from nanovllm.engine.run.transfer import Array, download, upload
from nanovllm.kernels.plain.ranking import most_likely
from nanovllm.kernels.table import Kernels

MAX_LOGITS = 1 << 23  # at a time; each takes about 50 bytes


def rows_at_a_time(vocab_size: int) -> int:
    """How many rows are computed together."""
    return max(1, MAX_LOGITS // vocab_size)


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of logits [B, V], in float32.

    Where rows do not begin at multiples of 16 bytes, PyTorch's sums depend on a row's place.
    """
    size = logits.shape[1]
    values = F.pad(logits.float(), (0, -size % 4), value=-torch.inf) if size % 4 else logits.float()
    return values.log_softmax(dim=1)[:, :size]


def warm_up_logprobs(logits: torch.Tensor) -> None:
    """Use the most device memory that reports on logits [B, V] need: all tokens are sorted."""
    logprobs = log_probabilities(logits)
    likely_columns(logprobs, logits.new_zeros(len(logits), dtype=torch.long), logits.shape[1])


def drawn_columns(computed: Computed, inputs: DrawInputs, kernels: Kernels) -> tuple[Columns, ...]:
    """The columns of a step's drawn tokens, a few rows at a time, in flight."""
    report, logits, token_ids = inputs.report, computed.logits, computed.token_ids
    assert report is not None and token_ids is not None
    columns = []
    size = rows_at_a_time(logits.shape[1])
    for start in range(0, len(report.rows), size):
        wanted = report.rows[start : start + size]
        rows = upload(wanted, logits.device)
        chosen = token_ids[rows].clamp_(min=0)  # where no token could be drawn, none is reported
        number = max(report.numbers[start : start + size])
        values = logits[rows].float()
        if report.mode.startswith("processed"):
            from nanovllm.engine.run.processed_logits import process

            process(values, wanted, computed, inputs, kernels)
        if report.mode.endswith("logprobs"):
            values = log_probabilities(values)
        columns.append(download_columns(likely_columns(values, chosen, number)))
    return tuple(columns)


def prompt_columns(
    hidden: torch.Tensor,
    arrays: Mapping[str, Array],
    compute_logits: ComputeLogits,
    vocab_size: int,
    is_first: bool,
) -> tuple[Columns, ...]:
    """The columns of a prefill's reports, from hidden states, a few rows at a time, in flight.

    All ranks compute the logits; the first has them.
    """
    columns, size = [], rows_at_a_time(vocab_size)
    for start in range(0, len(hidden), size):
        part = slice(start, start + size)
        logits = compute_logits(hidden[part], arrays[REPORTED][part])
        if is_first:
            chosen = upload(arrays["reported_ids"][part], logits.device)
            number = int(arrays["reported_numbers"][part].max())
            logprobs = log_probabilities(logits)
            if "reported_as_logits" in arrays:
                as_logits = upload(arrays["reported_as_logits"][part], logits.device)
                logprobs = torch.where(as_logits[:, None] > 0, logits.float(), logprobs)
            columns.append(download_columns(likely_columns(logprobs, chosen, number)))
    return tuple(columns)


def download_columns(columns: Columns) -> Columns:
    """Start copies of the columns to the host; returns them in flight."""
    return Columns(*map(download, columns))


def likely_columns(logprobs: torch.Tensor, chosen: torch.Tensor, number: int) -> Columns:
    """The tokens `chosen` [B], and after each the `number` most likely ones.

    `logprobs` [B, V] are log-probabilities, or what else is reported in their place.
    """
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
