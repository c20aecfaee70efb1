"""PromptReports: the log-probabilities of prompts' tokens, which a prefill reports."""

import numpy as np
import torch

from nanovllm.engine.run.reports import Columns, prompt_reports, unreported_indices
from nanovllm.engine.run.step_inputs import StepInputs
from nanovllm.engine.run.step_part import ComputeLogits, StepPart
from nanovllm.engine.run.transfer import Array, upload
from nanovllm.engine.schedule.batch import Batch


class PromptReports(StepPart):
    """Reports on prompts: the tokens [R] with reports, their ids, and how many others each has.

    All ranks compute the logits, a few rows at a time; `is_first` is for rank 0, which reports.
    """

    name = "prompt_reports"

    def __init__(self, vocab_size: int, is_first: bool) -> None:
        self._vocab_size, self._is_first = vocab_size, is_first

    def add_arrays(self, inputs: StepInputs, batch: Batch) -> None:
        """Add which tokens of a prefill have reports, and what is reported of each."""
        prefill = inputs.prefill
        if prefill is None or not (reports := prompt_reports(batch.seqs)):
            return
        starts = zip(batch.seqs, prefill.cu_seqlens_q.tolist(), strict=False)
        tokens = [
            start + index - seq.num_cached_tokens
            for seq, start in starts
            for index in unreported_indices(seq)
        ]
        ids = [(s.token_ids if s.generates else s.parts.keeper.labels)[i] for s, i, _ in reports]
        numbers = [number for _, _, number in reports]
        named = {"reported_tokens": tokens, "reported_ids": ids, "reported_numbers": numbers}
        inputs.arrays |= {name: np.array(values, np.int64) for name, values in named.items()}

    def tokens(self, inputs: StepInputs) -> Array | None:
        """The tokens with reports."""
        return inputs.arrays.get("reported_tokens")

    def take(
        self, hidden: torch.Tensor, inputs: StepInputs, compute_logits: ComputeLogits
    ) -> tuple[Columns, ...]:
        """The columns of the reports, in flight; on other ranks than the first there are none."""
        from nanovllm.engine.run.logprobs import download_columns, likely_columns, rows_at_a_time

        arrays, columns, size = inputs.arrays, [], rows_at_a_time(self._vocab_size)
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            logits = compute_logits(hidden[part], arrays["reported_tokens"][part])
            if self._is_first:
                chosen = upload(arrays["reported_ids"][part], logits.device)
                number = int(arrays["reported_numbers"][part].max())
                columns.append(download_columns(likely_columns(logits, chosen, number)))
        return tuple(columns)
