"""Sampler: from logits to token ids."""

import torch
from torch import nn

from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.filters import Filters, narrow


class Sampler(nn.Module):
    """Greedy and temperature rows in one batch; `kernels.plain.sample` says how they are drawn."""

    kernels: Kernels = PLAIN  # the runner binds others

    def forward(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor | None,
        keys: torch.Tensor | None,
        filters: Filters | None = None,
    ) -> torch.Tensor:
        """Token ids [B] for logits [B, V]; `temperatures` None says that every row is greedy.

        Temperatures [B] in float32, 0 for greedy; keys [B] in int64, all bits well mixed. Rows that
        nothing narrows are sampled as they are, whatever the others need.
        """
        if filters is None:
            return self.kernels.sample(logits, temperatures, keys)
        rows = filters.rows
        narrowed = logits[rows].float()
        narrow(narrowed, filters)
        if temperatures is not None and keys is not None:
            chosen = self.kernels.sample(narrowed, temperatures[rows], keys[rows])
        else:
            chosen = self.kernels.sample(narrowed, None, None)
        if len(rows) == len(logits):
            return chosen
        token_ids = self.kernels.sample(logits, temperatures, keys)
        token_ids[rows] = chosen
        return token_ids
