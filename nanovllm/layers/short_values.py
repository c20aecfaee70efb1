"""Self-attention with values that are shorter than keys, and with sinks in some layers."""

from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.heads_linear import HeadsLinear
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.mixer import Ropes, SelfAttention
from nanovllm.layers.sink_attention import SinkAttention


class ShortValues(SelfAttention):
    """Values of `value_dim` numbers, times `value_scale`, next to keys of `head_dim`.

    The cache has values with zeros behind them, as long as keys: attention computes columns of
    zeros, which are dropped. One kernel copies all rows. `LayerShape.needs` of a layer that
    `has_sinks` has "sinks".
    """

    def __init__(
        self, make: Build, hidden_size: int, heads: KeysAndValues, *,
        value_dim: int, value_scale: float, has_sinks: bool,
        qkv_bias: bool = False, o_bias: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        if make.formats.has_kv_scales():
            raise ValueError("scales for the KV cache of short values are not supported")
        super().__init__(make, hidden_size, heads, qkv_bias=qkv_bias, o_bias=o_bias, **options)
        self.value_dim, self.value_scale, self.has_sinks = value_dim, value_scale, has_sinks
        formats, ranks = make.formats, make.ranks
        self.qkv_proj = HeadsLinear(
            make, hidden_size, heads, formats.of("qkv_proj"), value_dim=value_dim, bias=qkv_bias
        )
        self.o_proj = RowParallelLinear(
            heads.num_heads * value_dim, hidden_size, o_bias, ranks, formats.of("o_proj")
        )
        if has_sinks:
            self.attn = SinkAttention(self.cache, heads.num_heads, ranks, options.get("scale"))

    @property
    def kind(self) -> tuple[Any, ...]:
        return *super().kind, self.value_dim, self.value_scale, self.has_sinks

    def attend(self, projected: torch.Tensor, ropes: Ropes) -> torch.Tensor:
        """[T, (H + KVH) * D + KVH * V] -> [T, H * V]."""
        num_kv_heads, head_dim = self.cache.num_kv_heads, self.head_dim
        size = (self.cache.num_heads + num_kv_heads) * head_dim
        values = projected[:, size:].unflatten(-1, (num_kv_heads, self.value_dim))  # type: ignore[no-untyped-call]
        padded = F.pad(values * self.value_scale, (0, head_dim - self.value_dim)).flatten(1)
        attended = super().attend(torch.cat([projected[:, :size], padded], dim=1), ropes)
        heads = attended.view(len(attended), -1, head_dim)
        return heads[..., : self.value_dim].flatten(1)
