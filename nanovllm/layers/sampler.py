"""Sampler: logits to token ids."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from nanovllm.kernels.table import PLAIN, Kernels

if TYPE_CHECKING:
    from nanovllm.layers.filters import Filters


class Sampler(nn.Module):
    """Samples greedy and temperature rows in one batch, as `kernels.plain.sample` defines."""

    def __init__(self, kernels: Kernels = PLAIN) -> None:
        super().__init__()
        self.kernels = kernels

    def forward(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor | None,
        keys: torch.Tensor | None,
        filters: "Sequence[Filters]" = (),
        token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Token ids [B] for logits [B, V].

        `temperatures` [B] in float32, 0 for greedy; None if all rows are greedy. `keys` [B] in
        int64, all bits well mixed. `filters` are applied only to their own rows. If `token_ids`
        is given, it holds the tokens of the rows without filters; the others are written to it.
        """
        if token_ids is None:
            if sum(len(part.rows) for part in filters) < len(logits):
                token_ids = self.kernels.sample(logits, temperatures, keys)
            else:
                token_ids = torch.empty(len(logits), dtype=torch.long, device=logits.device)
        for part in filters:
            part.draw(logits, temperatures, keys, token_ids, self.kernels)
        return token_ids
