"""Block: one layer of a decoder, of norms, a mixer and a feed-forward part."""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import nn

from nanovllm.layers.context import keep_adapters_of
from nanovllm.layers.feed_forward import FeedForward
from nanovllm.layers.layer import Build
from nanovllm.layers.mixer import Mixer, Ropes
from nanovllm.layers.rms_norm import RMSNorm

Named = tuple[str, RMSNorm]


@dataclass(frozen=True)
class Norms:
    """The norms of a block, each with its name in checkpoints; None where the block has no norm.

    A norm `after` a part normalizes the part's output, before it is added to the residual.
    """

    before_mixer: Named | None = None
    after_mixer: Named | None = None
    before_feed_forward: Named | None = None
    after_feed_forward: Named | None = None


def pre_norms(mixer: RMSNorm, feed_forward: RMSNorm) -> Norms:
    """The norms of most models: before each part."""
    return Norms(
        before_mixer=("input_layernorm", mixer),
        before_feed_forward=("post_attention_layernorm", feed_forward),
    )


class Parts(NamedTuple):
    """The modules of a block by their places."""

    mixer: Mixer
    feed_forward: FeedForward
    before_mixer: RMSNorm | None
    after_mixer: RMSNorm | None
    before_feed_forward: RMSNorm | None
    after_feed_forward: RMSNorm | None


class Block(nn.Module):
    """Norm, mix, add; norm, feed forward, add.

    The next norm, of the next block or of the decoder, does the last add: it adds in its own
    kernel, and adds up the results of several ranks. Modules have the names that they have in
    checkpoints. Each part's output is multiplied by `residual_scale` before it is added.
    """

    def __init__(
        self,
        make: Build,
        norms: Norms,
        mixer: Mixer,
        feed_forward: FeedForward,
        *,
        residual_scale: float = 1.0,
        mixer_name: str = "self_attn",
        feed_forward_name: str = "mlp",
    ) -> None:
        super().__init__()
        self.residual_scale = residual_scale
        of_norms = [getattr(norms, field.name) for field in fields(norms)]
        for named in ((mixer_name, mixer), (feed_forward_name, feed_forward), *of_norms):
            if named is not None:
                self.add_module(*named)
        self.parts = Parts(mixer, feed_forward, *(named and named[1] for named in of_norms))
        sums = self.parts.after_mixer or self.parts.before_feed_forward
        if sums is None:
            raise ValueError("a block needs a norm between its mixer and its feed-forward part")
        sums.sum_over(make.ranks)
        if self.parts.after_feed_forward is not None:
            self.parts.after_feed_forward.sum_over(make.ranks)

    @property
    def kind(self) -> tuple[Any, ...]:
        """A hashable value that is equal for blocks with parts of the same kinds."""
        return *self.parts.mixer.kind, *map(type, self.parts[1:])

    @property
    def leaves_sum(self) -> bool:
        """Whether the next norm must add up the ranks' results."""
        return self.parts.after_feed_forward is None

    def enter(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[Any, torch.Tensor]:
        """The mixer's input, and the new residual: the sum of the residual and x."""
        mixer, norm = self.parts.mixer, self.parts.before_mixer
        if norm is None:
            total = x if residual is None else residual + x
            return total, total
        rounding = mixer.rounding(x)
        if residual is None:
            return norm(x, rounding), x
        return norm.add(x, residual, rounding)

    def forward(
        self, x: Any, residual: torch.Tensor, ropes: Ropes, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next block's inputs, from what `enter` returned. All tokens enter the cache.

        With `rows`, the part of the block after attention is computed only for these tokens.
        """
        mixer, feed_forward, _, after_mixer, before, after = self.parts
        x = mixer.mix(x, ropes)
        if rows is not None:
            # Indexing by a tensor starts PyTorch's threads for a few rows, which takes milliseconds
            # where other processes compute.
            x, residual = x.index_select(0, rows), residual.index_select(0, rows)
            if not len(rows):  # no sequence samples: their prompts end in later steps
                return residual, residual
            keep_adapters_of(rows)
        x = mixer.project(x)
        if after_mixer is not None:
            x = after_mixer.of_sum(x)
        if self.residual_scale != 1.0:
            x = x * self.residual_scale
        if before is None:
            x = residual = residual + x
        else:
            x, residual = before.add(x, residual, feed_forward.rounding(x))
        x = feed_forward(x)
        if after is not None:
            x = after.of_sum(x)
        if self.residual_scale != 1.0:
            x = x * self.residual_scale
        return x, residual
