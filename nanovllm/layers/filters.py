"""What narrows a row's choice before it is sampled: R rows that asked for it, V tokens.

In this order: allowed ids, forbidden ids, biases, penalties, which `narrow` writes into logits, so
that what may not come gets minus infinity; then, for rows that are drawn from, `draw`.
"""

from dataclasses import dataclass

import torch

from nanovllm.kernels.plain.draw import Cuts

FORBIDDEN = -torch.inf

Entries = tuple[torch.Tensor, torch.Tensor]  # rows, and a token id for each


@dataclass(slots=True)
class Penalties:
    """Tokens that rows have seen: `ids` [R, N], each once, and the first again until N.

    `counts` [R, N] says how often each is in the output, 0 if in the prompt alone. A row that asks
    for no penalties has any ids.
    """

    ids: torch.Tensor
    counts: torch.Tensor
    repetition: torch.Tensor  # [R, 1], as are the others
    presence: torch.Tensor
    frequency: torch.Tensor


@dataclass(slots=True)
class Filters:
    """What narrows the rows `rows` [R] of a batch, which ascend; None is what none of them asks.

    The other fields count rows among these R. Where there are cuts, all the rows are drawn by them.
    """

    rows: torch.Tensor
    allowed: tuple[torch.Tensor, Entries] | None = None  # rows with a list, and their lists
    forbidden: Entries | None = None
    biases: tuple[Entries, torch.Tensor] | None = None
    penalties: Penalties | None = None
    cuts: Cuts | None = None

    @property
    def writes(self) -> bool:
        """Whether logits are to be written."""
        parts = (self.allowed, self.forbidden, self.biases, self.penalties)
        return any(part is not None for part in parts)


def narrow(logits: torch.Tensor, filters: Filters) -> None:
    """Narrow logits [R, V] in float32 in place, but for the cuts. Does not wait for the device."""
    if filters.allowed is not None:
        rows, entries = filters.allowed
        kept = logits[entries]
        logits.index_fill_(0, rows, FORBIDDEN)
        logits[entries] = kept
    if filters.forbidden is not None:
        logits.index_put_(filters.forbidden, logits.new_full((), FORBIDDEN))
    if filters.biases is not None:
        entries, values = filters.biases
        logits[entries] += values
    if filters.penalties is not None:
        penalize(logits, filters.penalties)


def penalize(logits: torch.Tensor, penalties: Penalties) -> None:
    """Lower the logits of tokens that were there already, in place.

    Repetition divides a positive logit and multiplies a negative one; frequency is taken off for
    each time that the token is in the output, presence once if it is there.
    """
    counts, repetition = penalties.counts, penalties.repetition
    old = logits.gather(1, penalties.ids)
    new = torch.where(old > 0, old / repetition, old * repetition)
    new = new - penalties.frequency * counts - penalties.presence * (counts > 0)
    logits.scatter_(1, penalties.ids, new)
