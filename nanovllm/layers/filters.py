"""What narrows a row's choice before it is sampled: R rows that asked for it, V tokens.

In this order: allowed ids, forbidden ids, biases, penalties; then, for rows that are drawn from,
at their temperature, min_p, top_k and top_p. What may not come gets a logit of minus infinity.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanovllm.layers.ranking import most_likely

CANDIDATES = 128  # how many tokens are looked at first where no top_k says
FORBIDDEN = -torch.inf

Entries = tuple[torch.Tensor, torch.Tensor]  # rows, and a token id for each


@dataclass(slots=True)
class Penalties:
    """Tokens that rows have seen: `ids` [R, N], each once, filled up with V.

    `counts` [R, N] says how often each is in the output, 0 if in the prompt alone.
    """

    ids: torch.Tensor
    counts: torch.Tensor
    repetition: torch.Tensor  # [R, 1], as are the others
    presence: torch.Tensor
    frequency: torch.Tensor


@dataclass(slots=True)
class Cuts:
    """Where the distributions of the rows `rows` of R are cut: [C, 1] each, with what cuts nothing.

    `largest_k` is the largest top_k below V, 0 if there is none.
    """

    rows: torch.Tensor
    temperatures: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    largest_k: int


@dataclass(slots=True)
class Filters:
    """What narrows the rows `rows` [R] of a batch; None stands for what none of them asks.

    The other fields count rows among these R.
    """

    rows: torch.Tensor
    allowed: tuple[torch.Tensor, Entries] | None = None  # rows with a list, and their lists
    forbidden: Entries | None = None
    biases: tuple[Entries, torch.Tensor] | None = None
    penalties: Penalties | None = None
    cuts: Cuts | None = None


def narrow(logits: torch.Tensor, filters: Filters) -> None:
    """Narrow logits [R, V] in float32, in place."""
    if filters.allowed is not None:
        rows, entries = filters.allowed
        kept = logits[entries]
        logits[rows] = FORBIDDEN
        logits[entries] = kept
    if filters.forbidden is not None:
        logits[filters.forbidden] = FORBIDDEN
    if filters.biases is not None:
        entries, values = filters.biases
        logits[entries] += values
    if filters.penalties is not None:
        penalize(logits, filters.penalties)
    if filters.cuts is not None:
        logits[filters.cuts.rows] = cut(logits[filters.cuts.rows], filters.cuts)


def penalize(logits: torch.Tensor, penalties: Penalties) -> None:
    """Lower the logits of tokens that were there already, in place.

    Repetition divides a positive logit and multiplies a negative one; frequency is taken off for
    each time that the token is in the output, presence once if it is there.
    """
    vocab_size = logits.shape[1]
    counts, repetition = penalties.counts, penalties.repetition
    old = F.pad(logits, (0, 1)).gather(1, penalties.ids)
    new = torch.where(old > 0, old / repetition, old * repetition)
    new = new - penalties.frequency * counts - penalties.presence * (counts > 0)
    rows, places = torch.nonzero(penalties.ids < vocab_size, as_tuple=True)
    logits[rows, penalties.ids[rows, places]] = new[rows, places]


def cut(logits: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """Logits [C, V] without what min_p, top_k and top_p leave out, one after the other.

    Each looks at the distribution that the one before has left; of equal tokens the first is taken
    to be more likely. What is left by the last two begins with the most likely token, so a few of
    those decide: where they do not, all are sorted.
    """
    vocab_size = logits.shape[1]
    # From the most likely down: a quotient may be -inf then, and no NaN.
    scaled = (logits - logits.amax(dim=1, keepdim=True)) / cuts.temperatures
    least = scaled.amax(dim=1, keepdim=True) + cuts.min_p.log()
    scaled.masked_fill_(scaled < least, FORBIDDEN)
    by_min_p = logits.masked_fill(scaled == FORBIDDEN, FORBIDDEN)
    goes_on = (cuts.top_k >= vocab_size) & (cuts.top_p < 1)
    values, ids = most_likely(scaled, cuts.largest_k or CANDIDATES)
    kept = _kept(values, scaled, cuts)
    if (kept[:, -1:] & goes_on).any():
        values, ids = most_likely(scaled, vocab_size)
        kept = _kept(values, scaled, cuts)
    chosen = by_min_p.gather(1, ids).masked_fill_(~kept, FORBIDDEN)
    out = torch.full_like(logits, FORBIDDEN).scatter_(1, ids, chosen)
    no_other = (cuts.top_k >= vocab_size) & (cuts.top_p >= 1)
    return torch.where(no_other, by_min_p, out)


def _kept(values: torch.Tensor, scaled: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """Which of the most likely tokens' `values` [C, K] top_k and top_p keep: the first of them.

    top_p keeps a token if those before it have less than its share of the mass.
    """
    by_k = torch.arange(values.shape[1], device=values.device) < cuts.top_k
    top = values[:, :1]
    weights = (values - top).double().exp_().masked_fill_(~by_k, 0.0)
    all_weights = (scaled - top).exp_().sum(dim=1, keepdim=True, dtype=torch.double)
    has_k = cuts.top_k < scaled.shape[1]
    total = torch.where(has_k, weights.sum(dim=1, keepdim=True), all_weights)
    before = weights.cumsum(dim=1) - weights
    kept = by_k & ((before < cuts.top_p * total) | (cuts.top_p >= 1))
    kept[:, 0] = True
    return kept
