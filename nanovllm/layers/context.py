"""The step's attention metadata. `Shard` sets it for each step; layers read it.

A thread runs one step at a time, and has a context of its own.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from nanovllm.layers.lora import AdapterRows


@dataclass(slots=True)
class Context:
    """The metadata of a step with B sequences and T tokens.

    Prefill: sequence b's queries are rows `cu_seqlens_q[b]:cu_seqlens_q[b + 1]`, and it has
    `cu_seqlens_k[b + 1] - cu_seqlens_k[b]` keys. If a sequence has more keys than queries, they
    are in the cache, and `block_tables` is set. Decode: `num_queries` rows for each sequence, at
    consecutive positions; a row's `context_lens` includes its own token, and is 0 for one that is
    not used: the last ones of a sequence, or all. `slot_mapping` [T] is the cache
    slot for each token's KV, or -1 if it is not stored.
    """

    is_prefill: bool
    slot_mapping: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    context_lens: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    num_queries: int = 1
    plan: Any = None  # what the attention backend computes once for all layers


class StateBatch(NamedTuple):
    """N sequences of a step with T tokens each. Slots are as in `StateStep`.

    All of `before` is read first: the states after a token may replace those before the first.
    """

    rows: torch.Tensor  # [N, T] of the step's tokens
    before: torch.Tensor  # [N]
    after: torch.Tensor  # [N, T]


@dataclass(slots=True)
class StateStep:
    """Where the B sequences of a step find states, and where its T tokens leave them.

    `before` [B] has the slots with the states before the sequences' first tokens: slot 0, with
    states of zeros, for those that begin. `after` [T] has the slots for the states after each
    token; -1, the last slot, where they are not kept. Sequence b's tokens are the rows
    `ends[b]:ends[b + 1]`, where `ends` is on the host; in a decode step each has `num_queries`.
    """

    before: torch.Tensor
    after: torch.Tensor
    ends: Any = None  # a NumPy array; None in a decode step
    num_queries: int = 1
    _batches: list[StateBatch] | None = None

    @property
    def batches(self) -> list[StateBatch]:
        """The sequences, those with equally many tokens together; made when first asked for."""
        if self._batches is None:
            if self.ends is None:
                rows = torch.arange(len(self.after), device=self.after.device)
                shape = -1, self.num_queries
                self._batches = [StateBatch(rows.view(shape), self.before, self.after.view(shape))]
            else:
                self._batches = self._prefill_batches()
        return self._batches

    def _prefill_batches(self) -> list[StateBatch]:
        lengths = np.diff(self.ends)
        members = [np.flatnonzero(lengths == length) for length in np.unique(lengths)]
        rows = [self.ends[alike, None] + np.arange(lengths[alike[0]]) for alike in members]
        # All numbers travel to the device together.
        numbers = np.concatenate([part.ravel() for part in (*members, *rows)], dtype=np.int64)
        parts = torch.from_numpy(numbers).to(self.after.device)
        indices = torch.split(parts[: len(lengths)], [len(alike) for alike in members])
        places = torch.split(parts[len(lengths) :], [each.size for each in rows])
        tables = [place.view(each.shape) for place, each in zip(places, rows, strict=True)]
        return [
            StateBatch(table, self.before[index], self.after[table])
            for index, table in zip(indices, tables, strict=True)
        ]


NOTHING: Mapping[str, Any] = {}

_current = threading.local()


@contextmanager
def attending(
    contexts: Context | list[Context], backends: Any, read: Mapping[str, Any] = NOTHING
) -> Iterator[None]:
    """In the block, layers attend by this metadata. The attention backend plans for it.

    With several cache groups there are a context and a backend for each: the contexts differ in
    slots and block tables. Without any there is one context, and no backend. `read` is what layers
    read of the parts of a step, by their names.
    """
    if isinstance(contexts, Context):
        contexts, backends = [contexts], [backends]
    for context, backend in zip(contexts, backends, strict=bool(backends)):
        backend.plan(context)
    _current.contexts = contexts
    try:
        with reading(read):
            yield
    finally:
        del _current.contexts


@contextmanager
def reading(read: Mapping[str, Any]) -> Iterator[None]:
    """In the block, layers read this of the parts of a step, by their names."""
    _current.read = read
    try:
        yield
    finally:
        del _current.read


def get_context(group: int = 0) -> Context:
    """The current step's metadata, for the layers of a cache group."""
    context: Context = _current.contexts[group]
    return context


def state_step() -> StateStep:
    """Where the current step's tokens find and leave states."""
    step: StateStep = _current.read["states"]
    return step


def adapter_rows() -> "AdapterRows | None":
    """The adapters of the rows that layers compute now; None outside a step, too."""
    rows: AdapterRows | None = getattr(_current, "read", NOTHING).get("adapters")
    return rows


def keep_adapters_of(rows: torch.Tensor) -> None:
    """From now on the step's layers compute only these of its rows."""
    if adapters := adapter_rows():
        _current.read = {**_current.read, "adapters": adapters.at(rows)}
