"""CacheSpec: what a mixer keeps between steps. Layers with equal specs share a cache group."""

from dataclasses import dataclass, replace

Heads = tuple[int, int, int]  # of queries, of keys, and the size of each


@dataclass(frozen=True)
class CacheSpec:
    """What a mixer keeps, on this rank. Its subclasses say of what kind that is."""


@dataclass(frozen=True)
class KeysAndValues(CacheSpec):
    """A key and a value for each token and head; with a window, of the last `window` tokens.

    `num_heads` queries read `num_kv_heads` keys.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def heads(self) -> Heads:
        """What attention is planned for."""
        return self.num_heads, self.num_kv_heads, self.head_dim

    def part(self, num_ranks: int) -> "KeysAndValues":
        """What each rank keeps of what all have together. Few key heads are replicated."""
        kv_heads = max(1, self.num_kv_heads // num_ranks)
        return replace(self, num_heads=self.num_heads // num_ranks, num_kv_heads=kv_heads)
