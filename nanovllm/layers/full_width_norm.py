"""FullWidthNorm: one RMSNorm over all heads of queries, or of keys, of all ranks together."""

from typing import Any

import torch
from torch import nn

from nanovllm.formats.stored import Loaded, copy_into
from nanovllm.kernels.table import Rounding
from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.layer import Build
from nanovllm.layers.rms_norm import RMSNorm


class FullWidthNorm(RMSNorm):
    """RMSNorm over the `num_heads` heads of all ranks, each of `head_dim`, with a weight for each.

    `SelfAttention` takes it as a norm of heads: rows are those of [T, heads, head_dim], where the
    heads are this rank's. With several ranks, the sums of squares are added up over the ranks; of
    the ranks that have the same key head, only the first adds its square.
    """

    is_plain = False

    def __init__(self, make: Build, num_heads: int, head_dim: int, eps: float) -> None:
        rank, size = make.ranks.rank, make.ranks.size
        first, copies = rank * num_heads // size, max(1, size // num_heads)
        self.part = slice(first * head_dim, (first + max(1, num_heads // size)) * head_dim)
        self.size, self.is_counted = num_heads * head_dim, rank % copies == 0
        super().__init__(self.part.stop - self.part.start, eps, make.ranks)

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill the weights of this rank's heads."""
        assert shard_id is None
        copy_into(param, loaded, (self.size,), (self.part,))

    def whole_shape(self, param: nn.Parameter, shard_id: int | None) -> tuple[int, ...]:  # noqa: ARG002
        return (self.size,)

    def forward(self, x: torch.Tensor, rounding: Rounding | None = None) -> Any:  # noqa: ARG002
        rows = x.reshape(-1, len(self.weight))
        if self.ranks.size == 1:
            return self.kernels.rms_norm(rows, self.weight, self.eps).view(x.shape)
        wide = rows.float()
        squares = self.kernels.row_sums(wide.square())
        squares = self.ranks.all_reduce(squares if self.is_counted else squares.zero_())
        factors = torch.rsqrt(squares / self.size + self.eps)
        return (wide * factors * self.weight).to(x.dtype).view(x.shape)


def full_width_norms(
    make: Build, heads: KeysAndValues, eps: float
) -> tuple[FullWidthNorm, FullWidthNorm]:
    """The norms of queries and of keys, for the heads of all ranks together."""
    queries, keys = (
        FullWidthNorm(make, n, heads.head_dim, eps) for n in (heads.num_heads, heads.num_kv_heads)
    )
    return queries, keys
