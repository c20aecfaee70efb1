"""Divide layers that keep different things, or attend differently far back, into cache groups."""

import math
from collections.abc import Sequence

from nanovllm.engine.cache.block_pool import Window
from nanovllm.engine.cache.groups import CacheGroup, CacheGroups
from nanovllm.layers.attention import Attention
from nanovllm.layers.cache_spec import Heads

WASTE = 1.1  # the memory that groups may take, relative to the least, to have fewer block tables


def divide(layers: Sequence[Attention], longest: int, reach: Window = 0) -> CacheGroups:
    """Divide these layers into groups, for sequences of up to `longest` tokens.

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
    """Choose the slots of a block. A kind is (layers, tensors of each layer, parts of a slot).

    With fewer slots a kind needs several groups, and with more slots some stay empty. Of all
    numbers that waste little, the largest makes the fewest groups.
    """
    of_a_layer = [-(-tensors // parts) for _, tensors, parts in kinds]
    in_one_group = [-(-layers * tensors // parts) for layers, tensors, parts in kinds]
    costs = {}  # by number of slots: the slots that a token takes in all groups together
    for number in range(max(of_a_layer), max(in_one_group) + 1):
        each = [number * parts // tensors for _, tensors, parts in kinds]
        groups = [-(-layers // most) for (layers, *_), most in zip(kinds, each, strict=True)]
        costs[number] = number * sum(groups)
    least = min(costs.values())
    return max(number for number, cost in costs.items() if cost <= WASTE * least)
