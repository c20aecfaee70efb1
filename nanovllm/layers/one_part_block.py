"""OnePartBlock: a block that has only a mixer, or only a feed-forward part."""

from typing import Any, cast

import torch
from torch import nn

from nanovllm.layers.block import Block, Named, Parts
from nanovllm.layers.context import keep_adapters_of
from nanovllm.layers.feed_forward import FeedForward
from nanovllm.layers.mixer import Mixer, Ropes


class OnePartBlock(Block):
    """x + part(norm(x)). The next norm does the add, and adds up the ranks' results."""

    def __init__(self, norm: Named, part: Mixer | FeedForward, name: str = "mixer") -> None:
        nn.Module.__init__(self)
        self.add_module(*norm)
        self.add_module(name, part)
        self.residual_scale = 1.0
        mixer = part if isinstance(part, Mixer) else None
        feed_forward = part if isinstance(part, FeedForward) else None
        # One of the two is missing: code that reads both handles blocks of other classes only.
        self.parts = Parts(cast(Any, mixer), cast(Any, feed_forward), norm[1], None, None, None)

    @property
    def kind(self) -> tuple[Any, ...]:
        mixer = self.parts.mixer
        return (*mixer.kind,) if mixer is not None else (type(self.parts.feed_forward),)

    def enter(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[Any, torch.Tensor]:
        """The part's input, and the new residual. A feed-forward part's rows are not rounded.

        In the last layer, only some of them are computed.
        """
        norm, mixer = self.parts.before_mixer, self.parts.mixer
        assert norm is not None
        rounding = mixer.rounding(x) if mixer is not None else None
        return (norm(x, rounding), x) if residual is None else norm.add(x, residual, rounding)

    def forward(
        self, x: Any, residual: torch.Tensor, ropes: Ropes, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mixer, feed_forward = self.parts.mixer, self.parts.feed_forward
        if mixer is not None:
            x = mixer.mix(x, ropes)
        if rows is not None:
            x, residual = x.index_select(0, rows), residual.index_select(0, rows)
            if not len(rows):  # no sequence samples: their prompts end in later steps
                return residual, residual
            keep_adapters_of(rows)
        return mixer.project(x) if mixer is not None else feed_forward(x), residual
