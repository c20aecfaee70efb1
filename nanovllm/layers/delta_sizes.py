"""The sizes of a gated delta net, which configs know before it is built. No PyTorch here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nanovllm.layers.cache_spec import State, StateTensor

# The rows of the projections, in the order of the layer: queries, keys, values, the gates of
# outputs, how much each head learns, and how much it forgets.
KINDS = "qkvzba"


@dataclass(frozen=True)
class DeltaNames:
    """What files call the parts of a gated delta net.

    `projections` has the kinds of rows of each tensor of the projections, in the order of `KINDS`.
    A tensor has all rows of a kind together, or is divided `by_key_head`.
    """

    projections: Mapping[str, str]
    norm: str
    out_proj: str
    by_key_head: bool = False


@dataclass(frozen=True)
class DeltaSizes:
    """Heads with memories of values by keys: `heads` of values, several of which share their keys.

    Convolutions read `width` tokens.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def keys(self) -> int:
        """Elements of all heads' keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of all heads' values."""
        return self.heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """The channels of convolutions: queries, keys and values."""
        return 2 * self.keys + self.values

    def rows(self, kinds: str) -> list[int]:
        """The number of rows of each of these kinds."""
        keys, values, heads = self.keys, self.values, self.heads
        sizes = dict(zip(KINDS, (keys, keys, values, values, heads, heads), strict=True))
        return [sizes[kind] for kind in kinds]

    @property
    def num_others(self) -> int:
        """Parameters of the convolution, the rates and the norm."""
        return self.conv_size * self.width + 2 * self.heads + self.value_dim

    @property
    def state(self) -> State:
        """What the mixer keeps: the last inputs of the convolution, and the memories."""
        memory = StateTensor((self.heads, self.key_dim, self.value_dim), in_float32=True)
        return State((StateTensor((self.width - 1, self.conv_size)), memory))

    @property
    def split(self) -> dict[str, int]:
        """What ranks divide, by the names in a config."""
        return {"linear_num_key_heads": self.key_heads, "linear_num_value_heads": self.heads}

    def part(self, num_ranks: int) -> "DeltaSizes":
        """The sizes on each of `num_ranks` ranks."""
        return replace(self, key_heads=self.key_heads // num_ranks, heads=self.heads // num_ranks)
