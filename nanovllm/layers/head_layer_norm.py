"""HeadLayerNorm: a LayerNorm with weights of its own for each head."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.formats.stored import Loaded, copy_into, copy_whole
from nanovllm.kernels.table import Rounding
from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.layer_norm import LayerNorm
from nanovllm.layers.ranks import Ranks


class HeadLayerNorm(LayerNorm):
    """Norms of rows [T * heads, D], where row t * heads + h has the weights of head h.

    `heads` are those of this rank, of `num_heads`. A checkpoint has a tensor for each head.
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float, heads: slice) -> None:
        super().__init__(head_dim, eps, bias=False)
        self.num_heads, self.heads = num_heads, heads
        ones = torch.ones(heads.stop - heads.start, head_dim)
        self.weight = nn.Parameter(ones, requires_grad=False)

    def parts(self, name: str) -> list[str]:
        return [f"norms.{head}.{name}" for head in range(self.num_heads)]

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill the weights of one head, or of all from one tensor [heads, D]."""
        if shard_id is None:
            whole = slice(0, param.shape[1])
            copy_into(param, loaded, self.whole_shape(param, None), (self.heads, whole))
        elif self.heads.start <= shard_id < self.heads.stop:
            copy_whole(param[shard_id - self.heads.start], loaded)

    def whole_shape(self, param: nn.Parameter, shard_id: int | None) -> tuple[int, ...]:
        size = param.shape[1]
        return (self.num_heads, size) if shard_id is None else (size,)

    def forward(self, x: torch.Tensor, rounding: Rounding | None = None) -> Any:  # noqa: ARG002
        normed = F.layer_norm(x, x.shape[-1:], eps=self.eps).view(-1, *self.weight.shape)
        return (normed * self.weight).view(x.shape)


def head_layer_norms(
    heads: KeysAndValues, eps: float, ranks: Ranks
) -> tuple[HeadLayerNorm, HeadLayerNorm]:
    """The norms of query heads and of key heads, with the heads of this rank."""
    first, here = ranks.rank * heads.num_kv_heads // ranks.size, heads.part(ranks.size)
    own_keys = slice(first, first + here.num_kv_heads)
    own_queries = ranks.equal_slice(heads.num_heads)
    return (
        HeadLayerNorm(heads.num_heads, heads.head_dim, eps, own_queries),
        HeadLayerNorm(heads.num_kv_heads, heads.head_dim, eps, own_keys),
    )
