"""SummedBlock: a block before one that begins without a norm, which would sum over the ranks."""

from typing import Any

import torch

from nanovllm.layers.block import Block
from nanovllm.layers.layer import Build
from nanovllm.layers.mixer import Ropes


class SummedBlock(Block):
    """A block that adds up the ranks' results of its feed-forward part itself."""

    def __init__(self, make: Build, *args: Any, **options: Any) -> None:
        super().__init__(make, *args, **options)
        self.ranks = make.ranks

    @property
    def leaves_sum(self) -> bool:
        return False

    def forward(
        self, x: Any, residual: torch.Tensor, ropes: Ropes, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = super().forward(x, residual, ropes, rows)
        return (self.ranks.all_reduce(x) if len(x) else x), residual
