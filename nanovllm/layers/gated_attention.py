"""Self-attention with a gate for each element of its output. The query projection computes it."""

from typing import Any

import torch

from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import QKVParallelLinear
from nanovllm.layers.mixer import Ropes
from nanovllm.layers.plus_one_norm import PlusOneAttention
from nanovllm.layers.row_order import RowOrdered, rows_of_kinds


class GatedQKV(RowOrdered, QKVParallelLinear):
    """Gates, queries, keys and values. Files have each head's query and gate in one tensor."""


class GatedAttention(PlusOneAttention):
    """The outputs of the heads are multiplied by sigmoid(gate), before the last projection.

    Norms of queries and keys have factors 1 + weight.
    """

    def __init__(
        self, make: Build, hidden_size: int, heads: KeysAndValues, *,
        qkv_bias: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(make, hidden_size, heads, qkv_bias=qkv_bias, **options)
        size = heads.num_heads * heads.head_dim
        rows = rows_of_kinds([size, size], make.ranks.size, heads.num_heads, order=(1, 0))
        self.qkv_proj: QKVParallelLinear = GatedQKV(
            hidden_size, heads.head_dim, 2 * heads.num_heads, heads.num_kv_heads, qkv_bias,
            make.ranks, make.formats.of("qkv_proj"), orders={0: rows},
        )  # fmt: skip
        self.gate_size = self.cache.num_heads * heads.head_dim

    def mix(self, x: Any, ropes: Ropes) -> torch.Tensor:
        projected = self.qkv_proj(x)
        attended = self.attend(projected[:, self.gate_size :], ropes)
        return self.attn.kernels.sigmoid_and_mul(attended, projected[:, : self.gate_size])
