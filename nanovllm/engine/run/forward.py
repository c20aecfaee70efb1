"""Forward: calls the model on one rank, with the values that layers and head read of a step."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from nanovllm.layers.backend import AttentionBackend
from nanovllm.layers.context import Context, attending, reading
from nanovllm.models.decoder import CausalLM


class Forward:
    """Calls the model. Each cache group has one of the `backends` of attention."""

    def __init__(self, model: CausalLM, backends: list[AttentionBackend]) -> None:
        self.model, self.backends = model, backends
        self.reads_cache = any(backend.reads_cache for backend in backends)

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        contexts: list[Context],
        read: Mapping[str, Any],
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The hidden states of these tokens, or only of the tokens at `rows`; tapped residuals.

        `read` has the values that layers read, by the names of step parts.
        """
        with attending(contexts, self.backends, read):
            out: tuple[torch.Tensor, list[torch.Tensor]] = self.model(input_ids, positions, rows)
            return out

    def logits(
        self, hidden: torch.Tensor, read: Mapping[str, Any], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The logits of hidden states [N, hidden], complete on rank 0; written to `out` if given.

        `read` has the values that the head reads for these rows.
        """
        with reading(read):
            return self.model.compute_logits(hidden, out)


def contexts_of(
    context: Context, slots: Iterable[torch.Tensor], tables: Iterable[torch.Tensor | None]
) -> list[Context]:
    """The first cache group's context, and those of the other groups."""
    others = zip(slots, tables, strict=True)
    return [context, *(replace(context, slot_mapping=s, block_tables=t) for s, t in others)]
