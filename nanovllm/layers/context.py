"""The step's attention metadata. `Shard` sets it for each step; layers read it.

A thread runs one step at a time, and has a context of its own.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.layers.lora import AdapterRows


@dataclass(slots=True)
class Context:
    """The metadata of a step with B sequences and T tokens.

    Prefill: sequence b's queries are rows `cu_seqlens_q[b]:cu_seqlens_q[b + 1]`, and it has
    `cu_seqlens_k[b + 1] - cu_seqlens_k[b]` keys. If a sequence has more keys than queries, they
    are in the cache, and `block_tables` is set. Decode: `num_queries` rows for each sequence, at
    consecutive positions; a row's `context_lens` includes its own token, and is 0 for one that is
    not used: the last ones of a sequence, or all. `slot_mapping` [T] is the cache
    slot for each token's KV, or -1 if it is not stored. `adapters` is None if no row has one.
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
    adapters: AdapterRows | None = None


_current = threading.local()


@contextmanager
def attending(contexts: Context | list[Context], backends: Any) -> Iterator[None]:
    """A block whose layers attend by this metadata, which the attention backend plans for.

    With several cache groups there are a context and a backend for each: the contexts differ in
    slots and block tables.
    """
    if isinstance(contexts, Context):
        contexts, backends = [contexts], [backends]
    for context, backend in zip(contexts, backends, strict=True):
        backend.plan(context)
    _current.contexts, _current.adapters = contexts, contexts[0].adapters
    try:
        yield
    finally:
        del _current.contexts, _current.adapters


def get_context(group: int = 0) -> Context:
    """The current step's metadata, for the layers of a cache group."""
    context: Context = _current.contexts[group]
    return context


def adapter_rows() -> AdapterRows | None:
    """The adapters of the rows that layers compute now; None outside a step, too."""
    adapters: AdapterRows | None = getattr(_current, "adapters", None)
    return adapters


def keep_adapters_of(rows: torch.Tensor) -> None:
    """From now on the step's layers compute only these of its rows."""
    if adapters := adapter_rows():
        _current.adapters = adapters.at(rows)
