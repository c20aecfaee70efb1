"""CacheSpec: what a mixer keeps between steps. Layers with equal specs share a cache group."""

from dataclasses import dataclass
from typing import NamedTuple


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


class StateTensor(NamedTuple):
    """A tensor of a state, in float32 or in the model's type."""

    shape: tuple[int, ...]
    in_float32: bool = False


@dataclass(frozen=True)
class State(CacheSpec):
    """Tensors of fixed sizes for each sequence, which each token changes."""

    tensors: tuple[StateTensor, ...]
