"""Penalties: lower logits for tokens that have occurred before."""

from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.engine.run.filters.entries import Row, column_of
from nanovllm.engine.run.transfer import Array

NAMES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
NO_PENALTY = (1.0, 0.0, 0.0)


@dataclass(slots=True)
class Penalties:
    """Tokens of each row's prompt and output: `ids` [R, N], each once, padded with the first one.

    `counts` [R, N] is how often each is in the output, 0 if only in the prompt. The ids of a row
    without penalties are arbitrary.
    """

    ids: torch.Tensor
    counts: torch.Tensor
    repetition: torch.Tensor  # [R, 1], as are the others
    presence: torch.Tensor
    frequency: torch.Tensor

    def apply(self, logits: torch.Tensor) -> None:
        """Lower the logits of each row's earlier tokens.

        Repetition divides a positive logit and multiplies a negative one. Frequency is subtracted
        once for each occurrence in the output, presence once if there is any.
        """
        old = logits.gather(1, self.ids)
        new = torch.where(old > 0, old / self.repetition, old * self.repetition)
        new = new - self.frequency * self.counts - self.presence * (self.counts > 0)
        logits.scatter_(1, self.ids, new)


def penalties(rows: list[Row], num_rows: int) -> Penalties | None:
    """The penalties of these rows, of `num_rows` in all."""
    counted: dict[int, tuple[Array, Array]] = {}
    weights = [NO_PENALTY] * num_rows
    for row, seq, assumed in rows:
        if seq.params.penalizes:
            seq.parts.counts.update(seq)
            counted[row] = seq.parts.counts.after(assumed)
            repetition, presence, frequency = (getattr(seq.params, name) for name in NAMES)
            weights[row] = repetition, presence, frequency
    if not counted:
        return None
    shape = num_rows, max(len(ids) for ids, _ in counted.values())
    columns: tuple[Array, Array] = np.zeros(shape, np.int64), np.zeros(shape, np.int32)
    for row, parts in counted.items():
        for column, part in zip(columns, parts, strict=True):
            column[row] = part[0]
            column[row, : len(part)] = part
    return Penalties(*map(torch.from_numpy, columns), *map(column_of, zip(*weights, strict=True)))
