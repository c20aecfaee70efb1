"""Sampler: from logits to token ids."""

from collections.abc import Sequence

import torch
from torch import nn

from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.filters import Filters, narrow


class Sampler(nn.Module):
    """Draws greedy and temperature rows in one batch, as `kernels.plain.sample` defines."""

    def __init__(self, kernels: Kernels = PLAIN) -> None:
        super().__init__()
        self.kernels = kernels

    def forward(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor | None,
        keys: torch.Tensor | None,
        filters: Sequence[Filters] = (),
        token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Token ids [B] for logits [B, V]; `temperatures` None says that every row is greedy.

        Temperatures [B] in float32, 0 for greedy; keys [B] in int64, all bits well mixed. Rows that
        nothing narrows are sampled as they are, whatever the others need; or they have their
        `token_ids` already, where the others' are put in.
        """
        if token_ids is None:
            if sum(len(part.rows) for part in filters) < len(logits):
                token_ids = self.kernels.sample(logits, temperatures, keys)
            else:
                token_ids = torch.empty(len(logits), dtype=torch.long, device=logits.device)
        for part in filters:
            token_ids[part.rows] = self._sample_part(logits, temperatures, keys, part)
        return token_ids

    def _sample_part(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor | None,
        keys: torch.Tensor | None,
        part: Filters,
    ) -> torch.Tensor:
        if len(part.rows) < len(logits):  # or these are all of them
            logits = logits[part.rows]
            temperatures = None if temperatures is None else temperatures[part.rows]
            keys = None if keys is None else keys[part.rows]
        if part.writes:
            logits = logits.to(torch.float32, copy=True)
            narrow(logits, part)
        if part.cuts is None or temperatures is None or keys is None:
            return self.kernels.sample(logits, temperatures, keys)
        return self.kernels.draw(logits, temperatures, keys, part.cuts)
