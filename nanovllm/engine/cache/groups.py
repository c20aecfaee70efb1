"""CacheGroups: groups of layers that share block tables, and their parts of the pool's memory.

A block of the pool has a number of slots of equal size, and belongs to one group at a time. So all
groups use the same blocks, and none is idle: if most layers of a model have a window, the other
layers get most of the blocks when contexts are long.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nanovllm.engine.cache.block_pool import Window
from nanovllm.layers.attention.base import AttentionBackend
from nanovllm.layers.attention.layer import Attention
from nanovllm.layers.cache_spec import Heads

WASTE = 1.1  # of memory, at most, for the sake of fewer block tables


@dataclass(frozen=True)
class CacheGroup:
    """Layers with a block table: they attend equally far back, and keep the same.

    A slot holds `parts` tensors of one layer's block: keys, values or latents. So block b of the
    pool is block b * `parts` of a layer's cache.
    """

    layers: tuple[Attention, ...]
    window: Window
    parts: int = 1

    @property
    def attention(self) -> AttentionBackend:
        """What plans a step for these layers, which are bound."""
        return self.layers[0].attention_backend


@dataclass(frozen=True)
class CacheGroups:
    """The groups of a model, and how many slots of how many elements a token takes in a block."""

    groups: tuple[CacheGroup, ...]
    num_slots: int
    slot_size: int  # numbers for each token of a block

    @property
    def windows(self) -> tuple[Window, ...]:
        """How far back each group attends."""
        return tuple(group.window for group in self.groups)

    @property
    def block_parts(self) -> tuple[int, ...]:
        """By how much each group's block numbers are multiplied in its block tables."""
        return tuple(group.parts for group in self.groups)


def single_group(layers: Sequence[Attention], window: Window = None) -> CacheGroups:
    """One group of layers that are all alike."""
    kinds = {(layer.cache.num_tensors, layer.cache.heads) for layer in layers}
    assert len(kinds) == 1, "layers need block tables of their own"
    cache = layers[0].cache
    num_slots = cache.num_tensors * len(layers)
    return CacheGroups((CacheGroup(tuple(layers), window),), num_slots, cache.row_size)


def divide(layers: Sequence[Attention], longest: int, reach: Window = 0) -> CacheGroups:
    """The groups of these layers, for sequences of up to `longest` tokens.

    Layers of other models may read the first group's blocks: `reach` is how far back they attend.
    """
    if not layers:
        return CacheGroups((), 0, 0)
    windows = [_limited(layer.kv.window, longest) for layer in layers]
    if reach != 0 and None not in windows:
        most = None if reach is None else max(reach, *(window or 0 for window in windows))
        windows = [most] * len(layers)
    kinds: dict[tuple[float, int, Heads, int], list[Attention]] = {}
    for layer, window in zip(layers, windows, strict=True):
        reaches, cache = math.inf if window is None else window, layer.cache
        kind = reaches, cache.row_size, cache.heads, cache.num_tensors
        kinds.setdefault(kind, []).append(layer)
    kinds = dict(sorted(kinds.items(), key=lambda kind: kind[0], reverse=True))
    slot_size = math.lcm(*(size for _, size, *_ in kinds))
    num_slots = _num_slots(
        [(len(alike), tensors, slot_size // size) for (_, size, _, tensors), alike in kinds.items()]
    )
    groups = []
    for (reaches, size, _, tensors), alike in kinds.items():
        window = None if reaches == math.inf else int(reaches)
        most_layers = num_slots * (slot_size // size) // tensors
        for start in range(0, len(alike), most_layers):
            some = tuple(alike[start : start + most_layers])
            groups.append(CacheGroup(some, window, slot_size // size))
    return CacheGroups(tuple(groups), num_slots, slot_size)


def _limited(window: Window, longest: int) -> Window:
    """The window; None if no sequence is longer."""
    return None if window is None or window >= longest else window


def _num_slots(kinds: Sequence[tuple[int, int, int]]) -> int:
    """The slots of a block. A kind is a number of layers, of tensors of each, and of parts.

    With fewer slots a kind needs several groups, and with more slots some stay empty. Of all
    numbers that waste little, the largest makes the fewest groups.
    """
    of_a_layer = [-(-tensors // parts) for _, tensors, parts in kinds]
    in_one_group = [-(-layers * tensors // parts) for layers, tensors, parts in kinds]
    costs = {}  # by the number of slots: what all groups together take for a token
    for number in range(max(of_a_layer), max(in_one_group) + 1):
        each = [number * parts // tensors for _, tensors, parts in kinds]
        groups = [-(-layers // most) for (layers, *_), most in zip(kinds, each, strict=True)]
        costs[number] = number * sum(groups)
    least = min(costs.values())
    return max(number for number, cost in costs.items() if cost <= WASTE * least)
