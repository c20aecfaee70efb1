"""Self-attention and feed-forward parts with weights that files store in another order."""

from typing import Any

from nanovllm.layers.activations import Activation
from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.file_order import (
    HeadOrder,
    OrderedColumns,
    OrderedQKV,
    OrderedRows,
    Transposed,
)
from nanovllm.layers.layer import Build
from nanovllm.layers.mixer import SelfAttention
from nanovllm.layers.plain_mlp import PlainMLP


class GroupedAttention(SelfAttention):
    """Files have fused projections, in groups: query heads, their key head and value head."""

    def __init__(
        self, make: Build, hidden_size: int, heads: KeysAndValues, *, qkv_bias: bool, **options: Any
    ) -> None:
        super().__init__(make, hidden_size, heads, qkv_bias=qkv_bias, **options)
        order = HeadOrder(heads.num_heads, heads.num_kv_heads, heads.head_dim)
        self.qkv_proj = OrderedQKV(
            order, hidden_size, heads.head_dim, heads.num_heads, heads.num_kv_heads, qkv_bias,
            make.ranks, make.formats.of("qkv_proj"),
        )  # fmt: skip


class TransposedAttention(SelfAttention):
    """Files have transposed matrices."""

    def __init__(
        self, make: Build, hidden_size: int, heads: KeysAndValues, *,
        qkv_bias: bool, o_bias: bool, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(make, hidden_size, heads, qkv_bias=qkv_bias, o_bias=o_bias, **options)
        ranks, formats = make.ranks, make.formats
        self.qkv_proj = OrderedQKV(
            Transposed(), hidden_size, heads.head_dim, heads.num_heads, heads.num_kv_heads,
            qkv_bias, ranks, formats.of("qkv_proj"),
        )  # fmt: skip
        self.o_proj = OrderedRows(
            Transposed(), heads.num_heads * heads.head_dim, hidden_size, o_bias, ranks,
            formats.of("o_proj"),
        )  # fmt: skip


class TransposedMLP(PlainMLP):
    """Files have transposed matrices."""

    def __init__(
        self, make: Build, hidden_size: int, intermediate_size: int, activation: Activation, *,
        bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(make, hidden_size, intermediate_size, activation, bias=bias)
        ranks, formats = make.ranks, make.formats
        self.up_proj = OrderedColumns(
            Transposed(), hidden_size, [intermediate_size], bias, ranks, formats.of("up_proj")
        )
        self.down_proj = OrderedRows(
            Transposed(), intermediate_size, hidden_size, bias, ranks, formats.of("down_proj")
        )
