"""CacheSpec: what a mixer keeps between steps. Layers with equal specs share a cache group."""

from dataclasses import dataclass


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
