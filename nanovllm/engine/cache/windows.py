"""WindowLimits: which blocks of a sequence each cache group still reads, and how many those are."""

import sys
from collections.abc import Iterable

from nanovllm.engine.cache.prefixes import Prefix

Window = int | None  # how many tokens back a group's layers attend; None for all


def kept_window(window: int, block_size: int) -> int:
    """How many tokens back a sequence keeps its blocks, if no layer attends further than `window`.

    At least a little more than a block: the last published block is the next one's parent.
    """
    return max(window, block_size + 2)


def most_held(window: Window, block_size: int) -> int:
    """The most blocks that a decoding sequence holds: its window may start within a block."""
    if window is None:
        return sys.maxsize
    return (kept_window(window, block_size) - 2) // block_size + 2


def longest_sequence(num_blocks: int, block_size: int, windows: Iterable[Window]) -> int:
    """How many tokens a sequence may have if it has the whole pool.

    Groups with a window take the blocks of that at most, and those without one share the rest.
    Unlimited if there is none without.
    """
    limits = sorted(most_held(window, block_size) for window in windows)
    for index, limit in enumerate(limits):
        num_each = num_blocks // (len(limits) - index)
        if limit > num_each:
            return num_each * block_size
        num_blocks -= limit
    return sys.maxsize


class WindowLimits:
    """What follows from the `windows` of the groups of a pool with `num_blocks` blocks."""

    def __init__(self, windows: tuple[Window, ...], num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size, self.windows = num_blocks, block_size, windows
        self.has_windows = any(window is not None for window in windows)
        self._kept = [sys.maxsize if w is None else kept_window(w, block_size) for w in windows]
        # The most blocks that a decoding sequence keeps in each group; and those that a long prompt
        # gets at once, with a window those of two windows, or of one if there are no more.
        self.most_kept = tuple(most_held(window, block_size) for window in windows)
        self._most_at_once = [
            limit if window is None else most_held(2 * kept, block_size)
            for window, limit, kept in zip(windows, self.most_kept, self._kept, strict=True)
        ]

    def num_passed(self, num_cached_tokens: int) -> list[int]:
        """For each group, how many blocks end before the window of the first uncached token."""
        size = self.block_size
        return [max(0, (num_cached_tokens + 1 - kept) // size) for kept in self._kept]

    def first_ends(self, num_blocks: int, passed: list[int]) -> list[int]:
        """For each group, how many of a sequence's `num_blocks` are in its table at first."""
        ends: list[int] = []
        for limits in (self._most_at_once, self.most_kept):
            ends = [
                min(num_blocks, start + limit) for start, limit in zip(passed, limits, strict=True)
            ]
            if sum(ends) - sum(passed) <= self.num_blocks:
                break
        return ends

    def restorable(self, path: list[Prefix], has_states: bool) -> list[Prefix]:
        """The longest part of a path of prefixes that all groups can restore.

        A group with a window needs the blocks that the next token attends to, and no others. A
        model that `has_states` needs a checkpoint at the end.
        """
        for group, window in enumerate(self.windows):
            if window is None:
                gap = (index for index, prefix in enumerate(path) if not prefix.blocks[group])
                path = path[: next(gap, len(path))]
        if not self.has_windows:
            while has_states and path and path[-1].checkpoint is None:
                path.pop()
            return path
        runs = [0] * len(self.windows)  # how many blocks before the end each group has cached
        longest = 0
        for length, prefix in enumerate(path, start=1):
            for group, blocks in enumerate(prefix.blocks):
                runs[group] = runs[group] + 1 if blocks else 0
            if has_states and prefix.checkpoint is None:
                continue
            passed = self.num_passed(length * self.block_size)
            if all(run >= length - start for run, start in zip(runs, passed, strict=True)):
                longest = length
        return path[:longest]
