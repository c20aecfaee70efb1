"""CacheGroups: groups of layers that share block tables, and their parts of the pool's memory.

A block of the pool has a number of slots of equal size, and belongs to one group at a time. So all
groups use the same blocks, and none is idle: if most layers of a model have a window, the other
layers get most of the blocks when contexts are long.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nanovllm.engine.cache.block_pool import Window
from nanovllm.layers.attention import Attention
from nanovllm.layers.backend import AttentionBackend


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share block tables: they attend equally far back, and keep equal rows.

    A slot holds `parts` tensors of one layer's block: keys, values or latents. So block b of the
    pool is block b * `parts` of a layer's cache.
    """

    layers: tuple[Attention, ...]
    window: Window
    parts: int = 1

    @property
    def attention(self) -> AttentionBackend:
        """The attention backend of these layers, which plans their steps. The layers are bound."""
        return self.layers[0].attention_backend


@dataclass(frozen=True)
class CacheGroups:
    """The groups of a model, and how many slots of how many elements a token takes in a block."""

    groups: tuple[CacheGroup, ...]
    num_slots: int
    slot_size: int  # elements for each token of a block

    @property
    def windows(self) -> tuple[Window, ...]:
        """How far back each group attends."""
        return tuple(group.window for group in self.groups)

    @property
    def block_parts(self) -> tuple[int, ...]:
        """The factor of each group by which block numbers are multiplied in its block tables."""
        return tuple(group.parts for group in self.groups)


def are_alike(layers: Sequence[Attention]) -> bool:
    """Whether there are layers, without windows, and all keep the same for each token."""
    kinds = {(layer.kv.window, layer.cache) for layer in layers}
    return len(kinds) == 1 and layers[0].kv.window is None


def single_group(layers: Sequence[Attention], window: Window = None) -> CacheGroups:
    """One group of layers that are all alike."""
    kinds = {(layer.cache.num_tensors, layer.cache.heads) for layer in layers}
    assert len(kinds) == 1, "layers need block tables of their own"
    cache = layers[0].cache
    num_slots = cache.num_tensors * len(layers)
    return CacheGroups((CacheGroup(tuple(layers), window),), num_slots, cache.row_size)
