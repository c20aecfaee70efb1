"""Pooled: hidden states that pooled sequences wait for, and their delivery."""

from typing import NamedTuple

import numpy as np
import torch

from nanovllm.engine.batch import Batch
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step.transfer import Array, download


class Pooled(NamedTuple):
    """A sequence that waits for the states of these tokens of its prompt, or for their sum."""

    seq: Sequence
    tokens: range


def pooled_of(batch: Batch) -> list[Pooled]:
    """What a step reports to sequences that want states, in the order of `pooled_tokens`."""
    pooled = (
        Pooled(seq, seq.pool.scheduled(seq)) for seq in batch.pooled_seqs if not seq.pool.labels
    )
    return [each for each in pooled if each.tokens]


def pooled_tokens(batch: Batch, pooled: list[Pooled], q_ends: Array) -> Array | None:
    """The tokens of a step whose states are pooled; None if there are none."""
    if not pooled:
        return None
    starts = dict(zip(batch.seqs, q_ends.tolist(), strict=False))
    firsts = (starts[seq] - seq.num_cached_tokens for seq, _ in pooled)
    places = [
        np.arange(first + tokens.start, first + tokens.stop)
        for first, (_, tokens) in zip(firsts, pooled, strict=True)
    ]
    return np.concatenate(places, dtype=np.int64)


class InFlight(NamedTuple):
    """States that are copied to the host, one after the other, and who waits for them."""

    pooled: list[Pooled]
    states: torch.Tensor


def states_in_flight(pooled: list[Pooled], states: torch.Tensor | None) -> InFlight | None:
    """The states, or their sums in float32 where these are enough; None if none are pooled."""
    if not pooled or states is None:
        return None
    if not any(seq.pool.adds_up for seq, _ in pooled):
        return InFlight(pooled, download(states))
    parts = torch.split(states, [len(tokens) for _, tokens in pooled])
    sums = [
        part.sum(dim=0, keepdim=True, dtype=torch.float32) if seq.pool.adds_up else part.float()
        for (seq, _), part in zip(pooled, parts, strict=True)
    ]
    return InFlight(pooled, download(torch.cat(sums)))


def deliver_states(states: InFlight | None) -> None:
    """Give the states, which have arrived on the host, to the sequences that wait for them."""
    if states is None:
        return
    sizes = [1 if seq.pool.adds_up else len(tokens) for seq, tokens in states.pooled]
    for (seq, tokens), part in zip(states.pooled, torch.split(states.states, sizes), strict=True):
        seq.pool.add_states(tokens, part)
