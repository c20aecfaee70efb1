"""Alternating updates (AltUp): several streams of hidden states, of which a block computes one.

N streams of T tokens: [N, T, hidden]. A block predicts all streams, computes the active one, and
corrects the others by how much the active one differs from its prediction.
"""

import math
from typing import Any

import torch
from torch import nn

from nanovllm.layers.context import keep_adapters_of
from nanovllm.layers.layer import Build, Layer
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.layers.mixer import Ropes
from nanovllm.layers.per_layer_embedding import PerLayerBlock
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.layers.sizes import AltUpSizes


class AltUp(Layer):
    """Predicts and corrects the streams, with coefficients that depend on the active stream."""

    def __init__(self, make: Build, hidden_size: int, eps: float, sizes: AltUpSizes) -> None:
        super().__init__()
        self.sizes = sizes
        num, of = sizes.num_streams, make.formats.of
        self.correct_output_scale = nn.Parameter(torch.ones(hidden_size), requires_grad=False)
        self.correction_coefs = ReplicatedLinear(num, num, False, of("correction_coefs"))
        self.prediction_coefs = ReplicatedLinear(num, num * num, False, of("prediction_coefs"))
        self.modality_router = ReplicatedLinear(hidden_size, num, False, of("modality_router"))
        self.router_norm = RMSNorm(hidden_size, eps)

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """The streams [N, T, hidden], each plus a sum of all of them."""
        num = self.sizes.num_streams
        coefs = self.prediction_coefs(self._route(streams[self.sizes.active])).view(-1, num, num)
        return self.router_norm.kernels.mix_streams(coefs, streams) + streams

    def correct(self, predicted: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """The predicted streams, corrected by the active one as it was computed [T, hidden]."""
        coefs = self.correction_coefs(self._route(computed)) + 1
        difference = computed - predicted[self.sizes.active]
        corrected: torch.Tensor = predicted + difference * coefs.t()[:, :, None]
        return corrected

    def scaled(self, streams: torch.Tensor) -> torch.Tensor:
        """The active stream [T, hidden], as the gate of the second embedding reads it."""
        active = streams[self.sizes.active]
        return active * self.correct_output_scale if self.sizes.scales else active

    def _route(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers [T, N] that the coefficients are made of."""
        routed = self.modality_router(self.router_norm(x) * (1 / x.shape[1]))
        return torch.tanh(routed.float()).to(x.dtype)


class Laurel(nn.Module):
    """A residual in addition to attention: x plus the norm of a product of low rank."""

    def __init__(self, make: Build, hidden_size: int, eps: float, rank: int) -> None:
        super().__init__()
        of = make.formats.of
        self.linear_left = ReplicatedLinear(hidden_size, rank, False, of("linear_left"))
        self.linear_right = ReplicatedLinear(rank, hidden_size, False, of("linear_right"))
        self.post_laurel_norm = RMSNorm(hidden_size, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.post_laurel_norm(self.linear_right(self.linear_left(x)))
        return x + normed


class AltUpBlock(PerLayerBlock):
    """Streams [N, T, hidden] and the part of the second embedding [T, P] -> streams.

    The active stream: norm, mix, norm, add, add Laurel's output; norm, feed forward, norm, add. The
    part is added to all streams but the first.
    """

    def __init__(self, *args: Any, altup: AltUp, laurel: Laurel) -> None:
        super().__init__(*args)
        self.altup, self.laurel = altup, laurel

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        part: torch.Tensor,
        ropes: Ropes,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        mixer, feed_forward, before_mixer, after_mixer, before, after = self.parts
        assert before_mixer is not None and after_mixer is not None
        assert before is not None and after is not None
        x = self.altup.predict(x)
        normed = before_mixer(x[self.altup.sizes.active])
        mixed = mixer.mix(normed, ropes)
        if rows is not None:
            x, mixed = x.index_select(1, rows), mixed.index_select(0, rows)
            if not len(rows):
                return x
            keep_adapters_of(rows)
            normed, part = normed.index_select(0, rows), part.index_select(0, rows)
        mixed = x[self.altup.sizes.active] + after_mixer.of_sum(mixer.project(mixed))
        active = (mixed + self.laurel(normed)) * (1 / math.sqrt(2))
        active = active + after.of_sum(feed_forward(before(active, feed_forward.rounding(active))))
        x = self.altup.correct(x, active)
        x[1:] += self.of_part(self.altup.scaled(x), part)
        return x
