"""Biases: numbers that are added to the logits of tokens."""

from dataclasses import dataclass

import torch

from nanovllm.engine.run.filters.entries import Row, biased_entries
from nanovllm.layers.filters import Entries


@dataclass(slots=True)
class Biases:
    """The tokens with a bias, and their biases."""

    entries: Entries
    values: torch.Tensor

    def apply(self, logits: torch.Tensor) -> None:
        """Add the biases."""
        logits[self.entries] += self.values


def biases(rows: list[Row], num_rows: int) -> Biases | None:  # noqa: ARG001
    """What `logit_bias` adds."""
    biased = [(row, seq.params) for row, seq, _ in rows if seq.params.logit_bias]
    return Biases(*biased_entries(biased)) if biased else None
