"""Sampler: from logits to token ids."""

import torch
from torch import nn

from nanovllm.kernels.table import PLAIN, Kernels


class Sampler(nn.Module):
    """Greedy and temperature rows in one batch; `kernels.plain.sample` says how they are drawn."""

    kernels: Kernels = PLAIN  # the runner binds others

    def forward(
        self, logits: torch.Tensor, temperatures: torch.Tensor | None, keys: torch.Tensor | None
    ) -> torch.Tensor:
        """Token ids [B] for logits [B, V]; `temperatures` None says that every row is greedy.

        Temperatures [B] in float32, 0 for greedy; keys [B] in int64, all bits well mixed.
        """
        return self.kernels.sample(logits, temperatures, keys)
