"""Self-attention with sinks: each head has a learned score that takes a part of every softmax.

A sink counts in the sum of a query's weights like the score of a key, and has no value.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nanovllm.formats.stored import Loaded, copy_into
from nanovllm.layers.attention import Attention
from nanovllm.layers.backend import Backend
from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.layer import Build
from nanovllm.layers.mixer import SelfAttention
from nanovllm.layers.ranks import Ranks


class SinkAttention(Attention):
    """Attention with a sink for each of the `num_heads` heads, which the ranks divide.

    Sinks are float32, as kernels read them: an update of weights in place is then seen at once.
    """

    initial = 0.0

    def __init__(
        self, cache: KeysAndValues, num_heads: int, ranks: Ranks, score_scale: float | None = None
    ) -> None:
        super().__init__(cache, score_scale)
        self.num_heads, self.own = num_heads, ranks.equal_slice(num_heads)
        sinks = torch.zeros(self.own.stop - self.own.start, dtype=torch.float32)
        self.sinks = nn.Parameter(sinks, requires_grad=False)

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill this rank's sinks."""
        assert shard_id is None
        copy_into(param, loaded, (self.num_heads,), (self.own,))

    def whole_shape(self, param: nn.Parameter, shard_id: int | None) -> tuple[int, ...]:  # noqa: ARG002
        return (self.num_heads,)

    def bind(self, backend: Backend) -> None:
        self.kv = replace(self.kv, sinks=self.sinks.detach())
        super().bind(backend)


class SinkSelfAttention(SelfAttention):
    """`SelfAttention` with sinks. `LayerShape.needs` of such a layer has "sinks"."""

    def __init__(self, make: Build, hidden_size: int, heads: KeysAndValues, **options: Any) -> None:
        super().__init__(make, hidden_size, heads, **options)
        if make.formats.has_kv_scales():
            raise ValueError("scales for the KV cache of attention with sinks are not supported")
        self.attn = SinkAttention(self.cache, heads.num_heads, make.ranks, options.get("scale"))
