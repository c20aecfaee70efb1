"""Mixer: the part of a block in which a token reads the tokens before it.

Here is self-attention, which keeps a key and a value for each token.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nanovllm.kernels.plain.norm_rope_store import Rope
from nanovllm.kernels.table import Rounding
from nanovllm.layers.attention import Attention
from nanovllm.layers.cache_spec import CacheSpec, KeysAndValues
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import LinearBase, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rms_norm import RMSNorm

Ropes = Mapping[str, Rope]  # a step's cosines and sines, by the name that the decoder gives a rope
ROPE = "rope"  # the name of a decoder's rope if all layers have the same


class Mixer(nn.Module):
    """A module with its own projections. `cache` says what it keeps between steps on this rank.

    A step calls `mix` for all of its tokens, then `project` for the rows that later layers need: in
    the last layer, only those that sample. The layers' context has the step's sequences and slots.
    """

    cache: CacheSpec

    @property
    def kind(self) -> tuple[Any, ...]:
        """A hashable value that is equal for mixers that use the same kernels."""
        return type(self), self.cache

    def rounding(self, x: torch.Tensor) -> Rounding | None:  # noqa: ARG002
        """How the kernel before `mix` may round len(x) rows; None if it must not round."""
        return None

    def mix(self, x: Any, ropes: Ropes) -> torch.Tensor:
        """Hidden states [T, hidden] -> [T, N], and the step's tokens enter the cache."""
        raise NotImplementedError

    def project(self, mixed: torch.Tensor) -> torch.Tensor:
        """Rows [R, N] -> [R, hidden]; the sum of all ranks' results is the output."""
        raise NotImplementedError


class ProjectedMixer(Mixer):
    """A mixer that is `attend` between two linear layers, its `linears`.

    Kernels may fuse these with what is next to them, and call `attend` alone.
    """

    def linears(self) -> tuple[LinearBase, RowParallelLinear]:
        """The first layer and the last one."""
        raise NotImplementedError

    def attend(self, projected: torch.Tensor, ropes: Ropes) -> torch.Tensor:
        """Outputs of the first layer -> inputs of the last one, and the tokens enter the cache."""
        raise NotImplementedError

    def rounding(self, x: torch.Tensor) -> Rounding | None:
        return self.linears()[0].rounding(x)

    def mix(self, x: Any, ropes: Ropes) -> torch.Tensor:
        return self.attend(self.linears()[0](x), ropes)

    def project(self, mixed: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linears()[1](mixed)
        return out


class SelfAttention(ProjectedMixer):
    """Grouped-query attention, with the `heads` of all ranks together.

    `rope` names the rope that rotates queries and keys; None: they are not rotated. `head_norms`
    are the norms of each query head and of each key head, before the rotation. `scale` is the
    factor of the scores, by default `head_dim` to the power of -1/2. A `soft_cap` c replaces a
    score s by c * tanh(s / c). The input may be wider than the output: `size_in` and `hidden_size`.
    """

    qkv_class: type[QKVParallelLinear] = QKVParallelLinear

    def __init__(
        self,
        make: Build,
        hidden_size: int,
        heads: KeysAndValues,
        *,
        rope: str | None = ROPE,
        qkv_bias: bool = False,
        o_bias: bool = False,
        head_norms: tuple[RMSNorm, RMSNorm] | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        size_in: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.rope = heads.head_dim, rope
        self.qkv_proj = self.qkv_class(
            size_in or hidden_size, heads.head_dim, heads.num_heads, heads.num_kv_heads,
            bias=qkv_bias, ranks=make.ranks, weight_format=make.formats.of("qkv_proj"),
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            heads.num_heads * heads.head_dim, hidden_size, o_bias, make.ranks,
            make.formats.of("o_proj"),
        )  # fmt: skip
        if head_norms is not None:
            self.q_norm, self.k_norm = head_norms
        self.has_head_norms = head_norms is not None
        # The attention's kernels can fuse only plain norms.
        self.norms = head_norms if head_norms and all(n.is_plain for n in head_norms) else None
        self.cache: KeysAndValues = heads.part(make.ranks.size)
        self.attn = _attention_class(make)(self.cache, scale, soft_cap)

    def linears(self) -> tuple[LinearBase, RowParallelLinear]:
        return self.qkv_proj, self.o_proj

    @property
    def kind(self) -> tuple[Any, ...]:
        return *super().kind, self.rope, self.attn.kv.soft_cap

    def attend(self, projected: torch.Tensor, ropes: Ropes) -> torch.Tensor:
        """[T, (H + 2 * KVH) * D] -> [T, H * D]."""
        qkv = projected.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-untyped-call]
        if self.has_head_norms and self.norms is None:
            qkv = self._normed(qkv)
        rope: Rope | None = ropes[self.rope] if self.rope is not None else None
        attended: torch.Tensor = self.attn(qkv, rope, self.norms)
        return attended.flatten(1)

    def _normed(self, qkv: torch.Tensor) -> torch.Tensor:
        from nanovllm.layers.head_norms import normed_heads

        return normed_heads(qkv, self.cache.num_kv_heads, (self.q_norm, self.k_norm))


def _attention_class(make: Build) -> type[Attention]:
    """The class of attention: another one if the checkpoint has scales for the KV cache."""
    if not make.formats.has_kv_scales():
        return Attention
    from nanovllm.layers.scaled_attention import ScaledAttention

    return ScaledAttention
