"""HeadsLinear: projections of queries, keys, values and gates, whose heads differ in size."""

from nanovllm.formats.format import WeightFormat
from nanovllm.formats.stored import RankPart
from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import LinearBase, QKVParallelLinear


class HeadsLinear(QKVParallelLinear):
    """Projections as one matrix: [T, hidden] -> [T, H * D + KVH * D + KVH * V + H * G].

    V is the size of a value, and G the number of gates of a query head; without gates, there is no
    projection of them. Ranks have heads as in `QKVParallelLinear`. The family's `Names.fused` name
    the projections in this order.
    """

    def __init__(
        self, make: Build, hidden_size: int, heads: KeysAndValues, weight_format: WeightFormat, *,
        value_dim: int, gates: int = 0, bias: bool = False,
    ) -> None:  # fmt: skip
        ranks, (num_heads, num_kv_heads, head_dim) = make.ranks, heads.heads
        queries, first = ranks.equal_slice(num_heads), ranks.rank * num_kv_heads // ranks.size
        keys = slice(first, first + max(1, num_kv_heads // ranks.size))
        self.num_heads, self.num_kv_heads = _count(queries), _count(keys)
        kinds = [
            (num_heads, queries, head_dim), (num_kv_heads, keys, head_dim),
            (num_kv_heads, keys, value_dim), *([(num_heads, queries, gates)] if gates else []),
        ]  # fmt: skip
        sizes = tuple(number * size for number, _, size in kinds)
        rows = tuple(slice(own.start * size, own.stop * size) for _, own, size in kinds)
        part = RankPart(sizes, rows, hidden_size, slice(0, hidden_size))
        LinearBase.__init__(self, part, bias, weight_format)


def _count(heads: slice) -> int:
    return int(heads.stop - heads.start)
