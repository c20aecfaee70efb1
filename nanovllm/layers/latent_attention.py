"""LatentAttention: DeepSeek's attention, in which all heads read one latent row of each token."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.layers.attention import Attention
from nanovllm.layers.latent import Latent
from nanovllm.layers.latent_expansion import LatentExpansion
from nanovllm.layers.latent_sizes import LatentSizes
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from nanovllm.layers.mixer import ROPE, Mixer, Ropes
from nanovllm.layers.query_growth import GROWTH
from nanovllm.layers.rms_norm import RMSNorm

if TYPE_CHECKING:
    from nanovllm.kernels.triton.linear.few_rows import FewRows  # which needs Triton

Multiply = Callable[[Any, LinearBase], torch.Tensor]  # rows by a linear layer
EPS = 1e-6  # of the norms in here, whatever that of the other norms is


class LatentAttention(Mixer):
    """Attention over latent rows, with the `sizes` of all ranks together.

    Keys and values are never made: `kv_b_proj` is folded into queries and outputs, in prefill as in
    decode steps, so that a token's output does not depend on how its prompt is divided. The ranks
    split the heads; each computes whole rows.
    """

    def __init__(self, make: Build, hidden_size: int, sizes: LatentSizes) -> None:
        super().__init__()
        self.sizes, ranks, of, bias = sizes, make.ranks, make.formats.of, sizes.has_bias
        self.cache: Latent = sizes.cache.part(ranks.size)
        query_rank, size, queries = sizes.query_rank, hidden_size, "q_proj"
        if query_rank is not None:
            self.q_a_proj = ReplicatedLinear(hidden_size, query_rank, bias, of("q_a_proj"))
            self.q_a_layernorm = RMSNorm(query_rank, EPS)
            size, queries = query_rank, "q_b_proj"
        projection = MergedColumnParallelLinear(size, [sizes.query_size], False, ranks, of(queries))
        self.add_module(queries, projection)
        self.queries = (projection,)  # a tuple: the module is registered by its name
        self.kv_a_proj_with_mqa = ReplicatedLinear(
            hidden_size, self.cache.width, bias, of("kv_a_proj_with_mqa")
        )
        self.kv_a_layernorm = RMSNorm(sizes.rank, EPS)
        self.kv_b_proj = LatentExpansion(sizes, ranks, of("kv_b_proj"))
        self.o_proj = RowParallelLinear(
            sizes.num_heads * sizes.value, hidden_size, bias, ranks, of("o_proj")
        )
        self.attn = Attention(self.cache, score_scale=sizes.scale)

    @property
    def kind(self) -> tuple[Any, ...]:
        return *super().kind, self.sizes

    def mix(self, x: Any, ropes: Ropes) -> torch.Tensor:
        """[T, hidden] -> [T, H * value]."""
        return self._mix(x, ropes, lambda x, layer: layer(x))

    def linears(self) -> tuple[LinearBase, ...]:
        """The linear layers that kernels for few rows compute."""
        first = (self.q_a_proj,) if self.sizes.query_rank is not None else ()
        return *first, *self.queries, self.kv_a_proj_with_mqa, self.o_proj

    def mix_few_rows(self, few_rows: "FewRows", x: Any, ropes: Ropes) -> torch.Tensor:
        """`mix` of a few rows, which may lack their norm's factor."""
        return self._mix(x, ropes, lambda x, layer: few_rows.linear(x, *layer.operand_and_bias))

    def _mix(self, x: Any, ropes: Ropes, multiply: Multiply) -> torch.Tensor:
        sizes, norm = self.sizes, self.kv_a_layernorm
        queries = self.query(x, ropes, multiply)
        plain, ends = torch.split(queries, [sizes.plain, sizes.rotated], -1)
        row = multiply(x, self.kv_a_proj_with_mqa)
        queries = row.new_empty(*plain.shape[:2], self.cache.width)
        folded, turned = torch.split(queries, [sizes.rank, sizes.rotated], -1)
        self.kv_b_proj.fold(plain, folded)
        rows = self.attn.kernels.latent_rows(
            ends, row, norm.weight, norm.eps, ropes[ROPE], sizes.interleaved, turned
        )
        sums = self.attn.attend_latent(queries, rows)
        return self.kv_b_proj.unfold(sums).flatten(1)

    def query(self, x: Any, ropes: Ropes, multiply: Multiply) -> torch.Tensor:  # noqa: ARG002
        """The queries [T, H, plain + rotated] of hidden states, before they are rotated."""
        if self.sizes.query_rank is not None:
            x = self.q_a_layernorm(multiply(x, self.q_a_proj))
        queries = multiply(x, self.queries[0])
        size = self.sizes.plain + self.sizes.rotated
        return queries.view(len(queries), self.cache.num_heads, size)

    def project(self, mixed: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.o_proj(mixed)
        return out


class GrowingLatentAttention(LatentAttention):
    """Latent attention that multiplies queries by the factors of a `QueryGrowth`."""

    def query(self, x: Any, ropes: Ropes, multiply: Multiply) -> torch.Tensor:
        factors, _ = ropes[GROWTH]
        return super().query(x, ropes, multiply).mul_(factors)
