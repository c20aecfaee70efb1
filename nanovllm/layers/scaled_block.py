"""A block with norms around its parts, and an output that is multiplied by a trained number."""

from typing import Any

import torch
from torch import nn

from nanovllm.layers.context import keep_adapters_of
from nanovllm.layers.layer import Layer
from nanovllm.layers.mixer import Ropes
from nanovllm.layers.per_layer_embedding import PerLayerBlock


class OutputScale(Layer):
    """The factor of a block's output, which checkpoints store as the block's own tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_scalar = nn.Parameter(torch.ones(1), requires_grad=False)


class ScaledBlock(PerLayerBlock):
    """Norm, mix, norm, add; norm, feed forward, norm, add; add the part of the second embedding.

    The sum is multiplied by a number.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.of_block = OutputScale()

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        part: torch.Tensor | None,
        ropes: Ropes,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        mixer, feed_forward, before_mixer, after_mixer, before, _ = self.parts
        assert before_mixer is not None and after_mixer is not None and before is not None
        mixed = mixer.mix(before_mixer(x, mixer.rounding(x)), ropes)
        if rows is not None:
            mixed, x = mixed.index_select(0, rows), x.index_select(0, rows)
            if not len(rows):
                return x
            keep_adapters_of(rows)
            part = None if part is None else part.index_select(0, rows)
        mixed = after_mixer.of_sum(mixer.project(mixed))
        normed, x = before.add(mixed, x, feed_forward.rounding(x))
        x = x + self.fed(normed, x)
        if part is not None:
            x = x + self.of_part(x, part)
        return x * self.of_block.layer_scalar

    def fed(self, normed: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """What the feed-forward part adds to x; `normed` is x after the norm before the part."""
        after = self.parts.after_feed_forward
        assert after is not None
        return after.of_sum(self.parts.feed_forward(normed))
