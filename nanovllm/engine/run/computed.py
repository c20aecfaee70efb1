"""Computed: the device tensors that a step leaves."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from nanovllm.engine.run.transfer import Array
from nanovllm.kernels.plain.read_table import Decoding

REPORTED = "reported_tokens"  # the array of prompt tokens with log-probabilities to report
# Computes the logits of hidden states [N, hidden], which are those of a prefill's tokens [N].
ComputeLogits = Callable[[torch.Tensor, Array], torch.Tensor]


class Computed(NamedTuple):
    """The logits of a step's samples, and the tokens that the step has already drawn.

    The rows of a decode graph may be padded at the end. With several queries of each sequence,
    `decoding` is what was read for them, and `outcome` the accepted tokens, if tokens were drawn.
    """

    logits: torch.Tensor  # [B, V] on rank 0; this rank's columns where ranks have drawn together
    table_rows: torch.Tensor  # [B] in int64: the rows of the device table that the tokens go to
    choices: tuple[torch.Tensor, torch.Tensor] | None = None  # temperatures and keys, if read there
    token_ids: torch.Tensor | None = None  # [B], if they were drawn in the graph
    num_queries: int = 1  # of each sequence in a decode step
    decoding: Decoding | None = None
    outcome: torch.Tensor | None = None  # what `accept` returned
    taken: Mapping[str, Any] = {}  # by step part, the results from a prefill's hidden states
    hidden: torch.Tensor | None = None  # [B, hidden], from which logits are made; if wanted

    def results(self, num_samples: int) -> torch.Tensor:
        """The results for the host: the token ids, or with drafts what `accept` returned."""
        if self.outcome is not None:
            return self.outcome[: num_samples // self.num_queries].flatten()
        assert self.token_ids is not None
        return self.token_ids[:num_samples]

    def first(self, number: int) -> "Computed":
        """The first `number` samples."""
        return self._replace(
            logits=self.logits[:number],
            table_rows=self.table_rows[:number],
            choices=self.choices and (self.choices[0][:number], self.choices[1][:number]),
            token_ids=None if self.token_ids is None else self.token_ids[:number],
        )
