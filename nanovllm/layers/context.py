"""The step's attention metadata, which every layer reads and no layer is handed.

One step runs at a time in a thread: the runner sets the context, the layers read it.
"""

import threading
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class Context:
    """B sequences, T tokens.

    Prefill: sequence b's queries are rows `cu_seqlens_q[b]:cu_seqlens_q[b + 1]`; its keys number
    `cu_seqlens_k[b + 1] - cu_seqlens_k[b]`, more than its queries where a part is cached, and then
    `block_tables` is there. Decode: one query each; `context_lens` counts its own token, 0 marks a
    padding row. `slot_mapping` [T] says where each token's KV goes, -1 for nowhere.
    """

    is_prefill: bool
    slot_mapping: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    context_lens: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    plan: Any = None  # what the attention backend works out once for all layers


_current = threading.local()


def set_context(context: Context) -> None:
    """Make `context` the current step's."""
    _current.context = context


def get_context() -> Context:
    """The current step's metadata."""
    context: Context = _current.context
    return context


def reset_context() -> None:
    """Forget the step, and the tensors that it held."""
    del _current.context
