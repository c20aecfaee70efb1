"""Computed: the device tensors that a step leaves."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from nanovllm.engine.run.transfer import Array
from nanovllm.kernels.plain.read_table import Decoding

REPORTED = "reported_tokens"  # the array of the prompts' tokens that are reported
# Computes the logits of hidden states [N, hidden], those of a prefill's tokens [N].
ComputeLogits = Callable[[torch.Tensor, Array], torch.Tensor]


class Computed(NamedTuple):
    """The logits of a step's samples, and what the step has already drawn of them.

    A decode graph's may be padded at the end. With several queries of each sequence, `decoding` is
    what was read for them, and `outcome` what was accepted, if tokens were drawn.
    """

    logits: torch.Tensor  # [B, V] on rank 0; this rank's columns where ranks have drawn together
    table_rows: torch.Tensor  # [B] in int64: the rows of the device table that the tokens go to
    choices: tuple[torch.Tensor, torch.Tensor] | None = None  # temperatures and keys, if read there
    token_ids: torch.Tensor | None = None  # [B], if they were drawn in the graph
    num_queries: int = 1  # of each sequence in a decode step
    decoding: Decoding | None = None
    outcome: torch.Tensor | None = None  # of `accept`
    taken: Mapping[str, Any] = {}  # what step parts have made of a prefill's hidden states
    hidden: torch.Tensor | None = None  # [B, hidden]: what the logits are made of, if it is wanted

    def results(self, num_samples: int) -> torch.Tensor:
        """What the host is sent: the token ids, or with drafts what was accepted."""
        if self.outcome is not None:
            return self.outcome[: num_samples // self.num_queries].flatten()
        assert self.token_ids is not None
        return self.token_ids[:num_samples]

    def first(self, number: int) -> "Computed":
        """The first samples."""
        return self._replace(
            logits=self.logits[:number],
            table_rows=self.table_rows[:number],
            choices=self.choices and (self.choices[0][:number], self.choices[1][:number]),
            token_ids=None if self.token_ids is None else self.token_ids[:number],
        )
