"""NestedFeedForward: a feed-forward part that is a module inside of another in checkpoints."""

from typing import Any

import torch

from nanovllm.kernels.table import Rounding
from nanovllm.layers.feed_forward import FeedForward


class NestedFeedForward(FeedForward):
    """The part `name`, alone. Other layers of the model may have experts beside it."""

    def __init__(self, name: str, part: FeedForward) -> None:
        super().__init__()
        self.add_module(name, part)
        self.inside = (part,)  # a tuple: the module is registered by its name

    def rounding(self, x: torch.Tensor) -> Rounding | None:
        return self.inside[0].rounding(x)

    def forward(self, x: Any) -> torch.Tensor:
        out: torch.Tensor = self.inside[0](x)
        return out
