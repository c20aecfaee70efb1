"""What layers read of the current step: attention metadata, and what step parts give them.

A thread runs one step at a time, and has a context of its own.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from nanovllm.kernels.operands.state_step import StateStep
    from nanovllm.layers.lora import AdapterRows


@dataclass(slots=True)
class Context:
    """The metadata of a step with B sequences and T tokens.

    Prefill: sequence b's queries are rows `cu_seqlens_q[b]:cu_seqlens_q[b + 1]`, and it has
    `cu_seqlens_k[b + 1] - cu_seqlens_k[b]` keys. If a sequence has more keys than queries, they
    are in the cache, and `block_tables` is set. Decode: `num_queries` rows for each sequence, at
    consecutive positions. A row's `context_lens` includes its own token; it is 0 for an unused row,
    which may be any of the last rows of a sequence. `slot_mapping` [T] is the cache slot for each
    token's KV, or -1 if it is not stored.
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


ADAPTERS, STATES = "adapters", "states"  # the names of step parts that layers read
NOTHING: Mapping[str, Any] = {}

_current = threading.local()


@contextmanager
def attending(
    contexts: Context | list[Context], backends: Any, read: Mapping[str, Any] = NOTHING
) -> Iterator[None]:
    """A block in which layers attend by this metadata. The attention backend plans for it.

    With several cache groups, each has a context and a backend: the contexts differ in slots and
    block tables. Without cache groups there is one context, and no backend. `read` has what layers
    read from the parts of a step, by the parts' names.
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
    """A block in which layers read these values of a step's parts, by the parts' names."""
    _current.read = read
    try:
        yield
    finally:
        del _current.read


def get_context(group: int = 0) -> Context:
    """The current step's metadata, for the layers of a cache group."""
    context: Context = _current.contexts[group]
    return context


def state_step() -> "StateStep":
    """The slots of states that the current step's tokens read and write."""
    step: StateStep = _current.read[STATES]
    return step


def adapter_rows() -> "AdapterRows | None":
    """The adapters of the rows that layers compute now; None without adapters or outside a step."""
    rows: AdapterRows | None = getattr(_current, "read", NOTHING).get(ADAPTERS)
    return rows


def keep_adapters_of(rows: torch.Tensor) -> None:
    """From now on the step's layers compute only these of its rows."""
    if adapters := adapter_rows():
        _current.read = {**_current.read, ADAPTERS: adapters.at(rows)}
