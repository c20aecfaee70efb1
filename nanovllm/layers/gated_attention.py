"""Self-attention with a gate for each element of its output. The query projection computes it."""

from typing import Any

import torch

from nanovllm.formats.format import DENSE, WeightFormat
from nanovllm.layers.linear import QKVParallelLinear
from nanovllm.layers.mixer import Ropes
from nanovllm.layers.plus_one_norm import PlusOneAttention
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.layers.row_order import RowOrdered, rows_of_kinds


class GatedQKV(RowOrdered, QKVParallelLinear):
    """Gates, queries, keys and values. Files have each head's query and gate in one tensor."""

    def __init__(
        self, hidden_size: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool,
        ranks: Ranks = ALONE, weight_format: WeightFormat = DENSE,
    ) -> None:  # fmt: skip
        size = num_heads * head_dim
        rows = rows_of_kinds([size, size], ranks.size, num_heads, order=(1, 0))
        super().__init__(
            hidden_size, head_dim, 2 * num_heads, num_kv_heads, bias, ranks, weight_format,
            orders={0: rows},
        )  # fmt: skip


class GatedAttention(PlusOneAttention):
    """The outputs of the heads are multiplied by sigmoid(gate), before the last projection.

    Norms of queries and keys have factors 1 + weight.
    """

    qkv_class = GatedQKV

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gate_size = self.cache.num_heads * self.head_dim

    def attend(self, projected: torch.Tensor, ropes: Ropes) -> torch.Tensor:
        attended = super().attend(projected[:, self.gate_size :], ropes)
        return self.attn.kernels.sigmoid_and_mul(attended, projected[:, : self.gate_size])
