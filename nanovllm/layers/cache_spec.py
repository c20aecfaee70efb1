"""CacheSpec: what a mixer keeps between steps. Layers with equal specs share a cache group."""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

Heads = tuple[int, int, int]  # of queries, of keys, and the size of each


@dataclass(frozen=True)
class CacheSpec:
    """What a mixer keeps on this rank. A subclass for each kind."""

    @property
    def each(self) -> tuple["CacheSpec", ...]:
        """What each mixer of a layer keeps: this, or one of `SeveralCaches`."""
        return (self,)


class TokenCache(CacheSpec):
    """`num_tensors` rows of equal size for each token, or for the last `window` tokens."""

    window: int | None
    num_tensors: ClassVar[int]
    value_width: int | None = None  # of rows that are keys and values: the columns of values

    @property
    def heads(self) -> Heads:
        """The numbers of heads of queries and of keys, and their size: attention plans for them."""
        raise NotImplementedError

    @property
    def row_size(self) -> int:
        """Numbers in a row."""
        _, num_kv_heads, head_dim = self.heads
        return num_kv_heads * head_dim

    def part(self, num_ranks: int) -> "TokenCache":
        """The part that each of `num_ranks` ranks keeps."""
        raise NotImplementedError


@dataclass(frozen=True)
class KeysAndValues(TokenCache):
    """A key and a value for each head of a token, or of the last `window` tokens.

    `num_heads` queries read `num_kv_heads` keys.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None

    num_tensors = 2

    @property
    def heads(self) -> Heads:
        return self.num_heads, self.num_kv_heads, self.head_dim

    def part(self, num_ranks: int) -> "KeysAndValues":
        """With fewer key heads than ranks, several ranks keep the same one."""
        kv_heads = max(1, self.num_kv_heads // num_ranks)
        return replace(self, num_heads=self.num_heads // num_ranks, num_kv_heads=kv_heads)


class StateTensor(NamedTuple):
    """A tensor of a state, in float32 or in the model's type."""

    shape: tuple[int, ...]
    in_float32: bool = False


@dataclass(frozen=True)
class State(CacheSpec):
    """Tensors of fixed sizes for each sequence, which each token changes."""

    tensors: tuple[StateTensor, ...]
