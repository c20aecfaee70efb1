"""Self-attention with a norm of values, too, which has no weights; keys may also be the values."""

from typing import Any

import torch

from nanovllm.formats.format import DENSE, WeightFormat
from nanovllm.formats.stored import RankPart
from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import LinearBase, RowParallelLinear
from nanovllm.layers.mixer import Ropes, SelfAttention
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.layers.shared_kv import lending_attention
from nanovllm.layers.weightless_norm import WeightlessNorm


class ValueNormAttention(SelfAttention):
    """Self-attention that normalizes the heads of queries, keys and values.

    With `lends`, later layers read its keys and values.
    """

    def __init__(
        self,
        make: Build,
        hidden_size: int,
        heads: KeysAndValues,
        *,
        head_norms: tuple[RMSNorm, RMSNorm],
        rope: str,
        scale: float,
        bias: bool = False,
        lends: bool = False,
    ) -> None:
        super().__init__(
            make, hidden_size, heads,
            rope=rope, qkv_bias=bias, o_bias=bias, head_norms=head_norms, scale=scale,
        )  # fmt: skip
        self.v_norm = WeightlessNorm(heads.head_dim, head_norms[0].eps)
        self.lends = lends
        if lends:
            self.attn = lending_attention(make)(self.cache, scale)

    @property
    def kind(self) -> tuple[Any, ...]:
        return *super().kind, self.lends

    def attend(self, projected: torch.Tensor, ropes: Ropes) -> torch.Tensor:
        values = projected[:, -self.cache.num_kv_heads * self.head_dim :]
        values.copy_(self.normed(values))
        return super().attend(projected, ropes)

    def normed(self, values: torch.Tensor) -> torch.Tensor:
        """The values [T, KVH * D], normalized; the argument stays as it is."""
        heads: torch.Tensor = self.v_norm(values.reshape(-1, self.head_dim))
        return heads.view(values.shape)


class KeysAsValues(ValueNormAttention):
    """The same without a projection of values: they are the keys before the norm of keys."""

    def __init__(
        self, make: Build, hidden_size: int, heads: KeysAndValues, *, bias: bool, **options: Any
    ) -> None:
        super().__init__(make, hidden_size, heads, bias=bias, **options)
        del self.qkv_proj
        self.qk_proj = QKParallelLinear(
            hidden_size, heads, bias, make.ranks, make.formats.of("qk_proj")
        )

    def linears(self) -> tuple[LinearBase, RowParallelLinear]:
        return self.qk_proj, self.o_proj

    def mix(self, x: Any, ropes: Ropes) -> torch.Tensor:
        projected = self.qk_proj(x)
        keys = projected[:, -self.cache.num_kv_heads * self.head_dim :]
        return self.attend(torch.cat([projected, keys], 1), ropes)


class QKParallelLinear(LinearBase):
    """Query and key projections as one matrix: [T, hidden] -> [T, (H + KVH) * D].

    Ranks have heads as in `QKVParallelLinear`.
    """

    def __init__(
        self, hidden_size: int, heads: KeysAndValues, bias: bool, ranks: Ranks = ALONE,
        weight_format: WeightFormat = DENSE,
    ) -> None:  # fmt: skip
        (num_heads, num_kv_heads, size), own = heads.heads, heads.part(ranks.size).num_kv_heads
        queries, first = ranks.equal_slice(num_heads * size), ranks.rank * num_kv_heads
        first //= ranks.size
        keys = slice(first * size, (first + own) * size)
        part = RankPart(
            (num_heads * size, num_kv_heads * size), (queries, keys),
            hidden_size, slice(0, hidden_size),
        )  # fmt: skip
        super().__init__(part, bias, weight_format)
