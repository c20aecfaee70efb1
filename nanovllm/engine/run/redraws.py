"""Redraws: draws the tokens of a decode graph's step again, where a feature narrows the draw."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from nanovllm.engine.run.computed import Computed

if TYPE_CHECKING:
    from nanovllm.layers.filters import Filters

Captured = tuple[torch.cuda.CUDAGraph, Computed]


class Redraws(Protocol):
    """Draws the tokens of a graph's step again, where a feature narrows the draw."""

    def takes(self, filters: "list[Filters]") -> bool:
        """Whether it can draw with these filters."""

    def capture(
        self, computed: Computed, capture: Callable[[Callable[[], Computed]], Captured]
    ) -> None:
        """Capture the draw of a graph's step."""

    def release(self) -> None:
        """Free the captured graphs."""

    def __call__(self, computed: Computed, filters: "list[Filters]") -> Computed:
        """Draw some rows of a graph's step again."""
