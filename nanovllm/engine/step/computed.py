"""Computed: the device tensors that a step leaves."""

from typing import NamedTuple

import torch

from nanovllm.engine.step.reports import Columns


class Computed(NamedTuple):
    """The logits of a step's samples, and what the step has already drawn of them.

    A decode graph's may be padded at the end, and after the drafts of each sequence.
    """

    logits: torch.Tensor  # [B, V] on rank 0; this rank's columns where ranks have drawn together
    table_rows: torch.Tensor  # [B] in int64: the rows of the device table that the tokens go to
    choices: tuple[torch.Tensor, torch.Tensor] | None = None  # temperatures and keys, if read there
    token_ids: torch.Tensor | None = None  # [B], if they were drawn in the graph
    prompt_logprobs: tuple[Columns, ...] = ()  # on rank 0, for the tokens that are reported
    num_queries: int = 1  # of each sequence in a decode step: as many samples, or fewer

    def at(self, samples: slice | torch.Tensor) -> "Computed":
        """Some of the samples."""
        return Computed(
            self.logits[samples],
            self.table_rows[samples],
            self.choices and (self.choices[0][samples], self.choices[1][samples]),
            None if self.token_ids is None else self.token_ids[samples],
        )
