"""HiddenStates: copies hidden states from steps to the sequences that keep them."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.run.computed import Computed
from nanovllm.engine.run.step_part import TakenHidden
from nanovllm.engine.run.transfer import Array, download, upload
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.sequence import Sequence


class Pooled(NamedTuple):
    """A sequence that waits for the states of these tokens of its prompt, or for their sum."""

    seq: Sequence
    pool: Any  # the `KeptStates` or `GeneratedStates` that they go to
    tokens: range


def pooled_of(batch: Batch) -> list[Pooled]:
    """The sequences that want states of a step's tokens, in the order of `pooled_tokens`."""
    if not batch.is_prefill:
        return []
    keepers = ((seq, seq.parts.keeper) for seq in batch.seqs[batch.num_decodes :])
    pooled = (Pooled(s, p, p.scheduled(s)) for s, p in keepers if p is not None and not p.labels)
    return [each for each in pooled if each.tokens]


def pooled_tokens(batch: Batch, pooled: list[Pooled], q_ends: Array) -> Array:
    """The tokens of a step that some sequence wants the states of."""
    starts = dict(zip(batch.seqs, q_ends.tolist(), strict=False))
    firsts = (starts[each.seq] - each.seq.num_cached_tokens for each in pooled)
    places = [
        np.arange(first + tokens.start, first + tokens.stop)
        for first, (_, _, tokens) in zip(firsts, pooled, strict=True)
    ]
    return np.concatenate(places, dtype=np.int64)


class InFlight(NamedTuple):
    """States in flight to the host, one after the other, and the sequence that each belongs to."""

    pooled: list[Pooled]
    states: torch.Tensor


def states_in_flight(pooled: list[Pooled], states: torch.Tensor | None) -> InFlight | None:
    """The states, or their sums in float32 if sums are enough; None if no sequence wants any."""
    if not pooled or states is None:
        return None
    if not any(pool.adds_up for _, pool, _ in pooled):
        return InFlight(pooled, download(states))
    parts = torch.split(states, [len(tokens) for _, _, tokens in pooled])
    sums = [
        part.sum(dim=0, keepdim=True, dtype=torch.float32) if pool.adds_up else part.float()
        for (_, pool, _), part in zip(pooled, parts, strict=True)
    ]
    return InFlight(pooled, download(torch.cat(sums)))


def deliver_states(states: InFlight | None) -> None:
    """Give the states, which have arrived on the host, to the sequences that wait for them."""
    if states is None:
        return
    sizes = [1 if pool.adds_up else len(tokens) for _, pool, tokens in states.pooled]
    for (_, pool, tokens), part in zip(states.pooled, _copies(states.states, sizes), strict=True):
        pool.add_states(tokens, part)


def _copies(states: torch.Tensor, sizes: list[int]) -> Iterable[Array]:
    """Copy the parts of states [N, hidden] in float32, because later steps write to this memory.

    All rows are converted together: calling PyTorch for each row takes longer than copying it.
    """
    if len(states) > len(sizes):
        parts = torch.split(states, sizes)
        return (part.to(torch.float32, copy=True).numpy() for part in parts)
    rows = states.float().numpy()
    return (rows[index : index + 1].copy() for index in range(len(rows)))


class DrawnStates(NamedTuple):
    """States [N, hidden] in flight that tokens are drawn from, and the token of each state.

    A token is identified by its sequence and its index in `token_ids`.
    """

    tokens: list[tuple[Sequence, int]]
    states: torch.Tensor


def drawn_states(
    seqs: list[Sequence], offsets: list[int], hidden: torch.Tensor | None
) -> DrawnStates | None:
    """The states of the next tokens, for those of `seqs` that keep them; `hidden` has all."""
    if hidden is None:
        return None
    rows = [row for row, seq in enumerate(seqs) if seq.parts.keeper is not None and seq.generates]
    if not rows:
        return None
    tokens = [(seqs[row], seqs[row].num_tokens + offsets[row]) for row in rows]
    places = upload(np.array(rows, np.int64), hidden.device)
    return DrawnStates(tokens, download(hidden.index_select(0, places)))


def deliver_drawn(drawn: DrawnStates | None) -> None:
    """Give the states, which have arrived on the host, to the sequences that keep them."""
    if drawn is not None:
        rows = _copies(drawn.states, [1] * len(drawn.tokens))
        for (seq, index), row in zip(drawn.tokens, rows, strict=True):
            seq.parts.keeper.add_drawn(index, row)


class HiddenStates:
    """The engine's `HiddenReader`."""

    def asked(self, batch: Batch) -> list[Pooled]:
        """The states that sequences want of a prefill's tokens."""
        return pooled_of(batch)

    def tokens(self, batch: Batch, asked: list[Pooled], q_ends: Array) -> Array:
        """The tokens of the step that some sequence wants the states of."""
        return pooled_tokens(batch, asked, q_ends)

    def keeps_drawn(self, seqs: list[Sequence]) -> bool:
        """Whether some sequences keep the states that their next tokens are drawn from."""
        return any(seq.parts.keeper is not None and seq.generates for seq in seqs)

    def launch(
        self, asked: list[Pooled], seqs: list[Sequence], offsets: list[int], computed: Computed
    ) -> Callable[[], None]:
        """Start the copies to the host; returns a function that gives them to the sequences."""
        states = states_in_flight(asked, computed.taken.get(TakenHidden.name))
        drawn = drawn_states(seqs, offsets, computed.hidden)

        def deliver() -> None:
            deliver_states(states)
            deliver_drawn(drawn)

        return deliver
