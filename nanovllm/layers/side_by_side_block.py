"""SideBySideBlock: two mixers read the same norm, and their outputs are added."""

from typing import Any, NamedTuple

import torch

from nanovllm.layers.block import Block, Norms
from nanovllm.layers.context import keep_adapters_of
from nanovllm.layers.feed_forward import FeedForward
from nanovllm.layers.layer import Build
from nanovllm.layers.mixer import Mixer, Ropes


class Factors(NamedTuple):
    """The factors of the first mixer's input, and of the outputs of both."""

    first_in: float = 1.0
    first_out: float = 1.0
    second_out: float = 1.0


NO_FACTORS = Factors()


class SideBySideBlock(Block):
    """Norm, mix in two ways, add both; norm, feed forward, add. It has norms before its parts.

    The layer keeps what the first mixer keeps and what the `second` one keeps.
    """

    def __init__(
        self,
        make: Build,
        norms: Norms,
        first: Mixer,
        second: Mixer,
        feed_forward: FeedForward,
        *,
        factors: Factors = NO_FACTORS,
        second_name: str = "mamba",
        **options: Any,
    ) -> None:
        super().__init__(make, norms, first, feed_forward, **options)
        self.add_module(second_name, second)
        self.second, self.factors = (second,), factors  # a tuple: it is registered by its name

    @property
    def kind(self) -> tuple[Any, ...]:
        return *super().kind, *self.second[0].kind

    def enter(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[Any, torch.Tensor]:
        """Rows are not rounded for a mixer, as the other one reads them, too."""
        norm = self.parts.before_mixer
        assert norm is not None
        return (norm(x), x) if residual is None else norm.add(x, residual)

    def forward(
        self, x: Any, residual: torch.Tensor, ropes: Ropes, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, feed_forward, before = self.parts[0], self.parts[1], self.parts.before_feed_forward
        (second,), factors = self.second, self.factors
        assert before is not None
        other = second.mix(x, ropes)
        mixed = first.mix(x if factors.first_in == 1.0 else x * factors.first_in, ropes)
        if rows is not None:
            mixed, other, residual = (
                each.index_select(0, rows) for each in (mixed, other, residual)
            )
            if not len(rows):  # no sequence samples: their prompts end in later steps
                return residual, residual
            keep_adapters_of(rows)
        out = first.project(mixed)
        if factors.first_out != 1.0:
            out = out * factors.first_out
        out = torch.add(out, second.project(other), alpha=factors.second_out)
        x, residual = before.add(out, residual, feed_forward.rounding(out))
        return feed_forward(x), residual
