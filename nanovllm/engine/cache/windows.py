"""WindowedBlocks: the block manager of a model in which some cache groups have a window."""

import sys

from nanovllm.engine.cache.block_manager import BlockManager
from nanovllm.engine.cache.block_pool import Window
from nanovllm.engine.cache.prefixes import Prefix
from nanovllm.engine.schedule.sequence import Sequence


def kept_window(window: int, block_size: int) -> int:
    """How many tokens back a sequence keeps its blocks, if no layer attends further than `window`.

    More than a block, as the last published block is the parent of the next one.
    """
    return max(window, block_size + 2)


class WindowedBlocks(BlockManager):
    """Sequences free the blocks behind the windows, and a long prompt gets its blocks in parts.

    The blocks behind a window stay cached until other sequences take them. To restore a prefix, a
    group with a window needs only the blocks that the next token attends to.
    """

    has_windows = True

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        windows: tuple[Window, ...] = (None,),
        has_states: bool = False,
    ) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching, windows, has_states)
        self._kept = [sys.maxsize if w is None else kept_window(w, block_size) for w in windows]
        # The most blocks that a long prompt gets at first: in a group with a window those of two
        # windows, or of one if the pool is small. `grow` adds the others.
        self._most_at_once = [
            limit if window is None else self.most_held(2 * kept, block_size)
            for window, limit, kept in zip(windows, self.most_kept, self._kept, strict=True)
        ]

    @staticmethod
    def most_held(window: Window, block_size: int) -> int:
        """The most blocks that a decoding sequence has: its window may start within a block."""
        if window is None:
            return sys.maxsize
        return (kept_window(window, block_size) - 2) // block_size + 2

    def free(self, seq: Sequence) -> None:
        """Free all blocks of `seq`, last first, so that its tail is evicted before its prefix.

        The blocks behind its windows belong to that prefix: if they are still cached, they are
        moved to the end of the queue.
        """
        passed = seq.num_passed_blocks
        super().free(seq)
        path = self._path(seq, max(passed, default=0))
        for group, end in enumerate(passed):
            self._renew([block for prefix in path[:end] for block in prefix.blocks[group][:1]])

    def pass_by(self, seq: Sequence) -> None:
        """Free the blocks of `seq` that are behind the window of the next token to compute.

        Called before a step's tokens are appended: tokens in flight come after these blocks.
        A prompt's blocks stay cached; blocks of generated tokens are reused first, so that a long
        answer overwrites its own beginning.
        """
        num_passed = self._num_passed(seq.num_cached_tokens)
        if num_passed == seq.num_passed_blocks:
            return
        self.publish(seq, min(seq.num_cached_tokens, seq.num_known_tokens))
        for group, end in enumerate(num_passed):
            table, start = seq.block_tables[group], seq.num_passed_blocks[group]
            if end > start:
                self._release(table[start:end])
                seq.num_passed_blocks[group] = end
                self._forget_generated(seq, group, start)

    def _forget_generated(self, seq: Sequence, group: int, start: int) -> None:
        """Unpublish the generated blocks behind the window, from the one before `start` on.

        The last one stays: a request that continues the last full block reads it.
        """
        end = seq.num_passed_blocks[group]
        of_prompt = -(-seq.num_prompt_tokens // self.block_size)
        prefix = self.published[seq.block_tables[group][end]]
        for index in range(end - 1, max(start - 1, of_prompt) - 1, -1):
            if prefix is None or prefix.parent is None:
                return
            prefix = prefix.parent
            for block in prefix.blocks[group] if index < end - 1 else ():
                if self.ref_counts[block] == 0:
                    self._unpublish(block)

    def _num_passed(self, num_cached_tokens: int) -> list[int]:
        size = self.block_size
        return [max(0, (num_cached_tokens + 1 - kept) // size) for kept in self._kept]

    def _first_ends(self, num_blocks: int, passed: list[int]) -> list[int]:
        ends: list[int] = []
        for limits in (self._most_at_once, self.most_kept):
            ends = [
                min(num_blocks, start + limit) for start, limit in zip(passed, limits, strict=True)
            ]
            if sum(ends) - sum(passed) <= self.num_blocks:
                break
        return ends

    def _restorable(self, path: list[Prefix]) -> list[Prefix]:
        """The longest part of a path of prefixes that all groups can restore."""
        for group, window in enumerate(self.windows):
            if window is None:
                gap = (index for index, prefix in enumerate(path) if not prefix.blocks[group])
                path = path[: next(gap, len(path))]
        runs = [0] * self.num_groups  # for each group, how many cached blocks the path ends with
        longest = 0
        for length, prefix in enumerate(path, start=1):
            for group, blocks in enumerate(prefix.blocks):
                runs[group] = runs[group] + 1 if blocks else 0
            if self.has_states and prefix.checkpoint is None:
                continue
            passed = self._num_passed(length * self.block_size)
            if all(run >= length - start for run, start in zip(runs, passed, strict=True)):
                longest = length
        return path[:longest]
