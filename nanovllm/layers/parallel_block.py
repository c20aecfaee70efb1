"""ParallelBlock: the mixer and the feed-forward part read the same hidden states."""

from typing import Any

import torch

from nanovllm.layers.block import Block, Named, Norms
from nanovllm.layers.context import keep_adapters_of
from nanovllm.layers.feed_forward import FeedForward
from nanovllm.layers.layer import Build
from nanovllm.layers.mixer import Mixer, Ropes


class ParallelBlock(Block):
    """x + mixer(norm(x)) + feed_forward(norm(x)).

    Both parts read the same norm of x, or the feed-forward part has `own_norm`. The next norm adds
    up the ranks' results of both parts together.
    """

    def __init__(
        self,
        make: Build,
        norm: Named,
        mixer: Mixer,
        feed_forward: FeedForward,
        own_norm: Named | None = None,
        **options: Any,
    ) -> None:
        norms = Norms(before_mixer=norm, before_feed_forward=own_norm or norm)
        super().__init__(make, norms, mixer, feed_forward, **options)
        self.has_own_norm = own_norm is not None

    def enter(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[Any, torch.Tensor]:
        """Rows are not rounded for the mixer, as the feed-forward part reads them, too."""
        norm = self.parts.before_mixer
        assert norm is not None
        return (norm(x), x) if residual is None else norm.add(x, residual)

    def forward(
        self, x: Any, residual: torch.Tensor, ropes: Ropes, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mixer, feed_forward, own_norm = self.parts.mixer, self.parts.feed_forward, None
        if self.has_own_norm:
            own_norm = self.parts.before_feed_forward
        mixed = mixer.mix(x, ropes)
        if rows is not None:
            x, mixed, residual = (each.index_select(0, rows) for each in (x, mixed, residual))
            if not len(rows):  # no sequence samples: their prompts end in later steps
                return residual, residual
            keep_adapters_of(rows)
        out = mixer.project(mixed) + feed_forward(x if own_norm is None else own_norm(residual))
        return out if self.residual_scale == 1.0 else out * self.residual_scale, residual
