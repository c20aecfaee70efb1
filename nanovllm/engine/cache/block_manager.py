"""BlockManager: which sequences hold which KV block, and which blocks hold a reusable prefix.

It knows block numbers and token ids, and no tensors.
"""

import sys
from collections.abc import Callable, Set
from typing import NamedTuple

from nanovllm.engine.cache.block_pool import BlockPool, Window
from nanovllm.engine.cache.prefixes import Prefix, block_hashes, block_tokens, path_of
from nanovllm.engine.schedule.sequence import Sequence

UNLIMITED = 1 << 40  # blocks, more than any sequence has
NO_BLOCK = 0  # in a table, in place of a block behind the window; no kernel reads it


class FreeBlocks(NamedTuple):
    """The KV blocks that sequences may take."""

    number: int
    block_size: int
    most_held: tuple[int, ...]  # for each cache group, the most blocks that a sequence grows to


class BlockManager(BlockPool):
    """Gives sequences blocks of `block_size` tokens, and finds the prefixes that are cached.

    Layers that attend equally far back form a group, and a sequence has a block table for each
    group. All groups take blocks from the same pool, so that none is idle.

    A later request with the same tokens up to the end of a published block can use that block.

    This class is for groups that attend to all tokens. If some groups have windows,
    `WindowedBlocks` also frees the blocks behind the windows: the sequence no longer holds the
    first `num_passed_blocks` blocks of such a table, and no kernel reads these entries.

    If the model `has_states`, a prefix can be restored only where it has a checkpoint.
    """

    has_windows = False  # whether `pass_by` has to be called

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        windows: tuple[Window, ...] = (None,),
        has_states: bool = False,
    ) -> None:
        super().__init__(num_blocks, windows)
        self.block_size = block_size
        self.num_groups = len(windows)  # blocks that a sequence needs for `block_size` tokens
        self.has_states = has_states
        self.enable_prefix_caching = enable_prefix_caching
        self.most_kept = tuple(self.most_held(window, block_size) for window in windows)

    @staticmethod
    def most_held(window: Window, block_size: int) -> int:  # noqa: ARG004
        """The most blocks that a decoding sequence has in a group."""
        return sys.maxsize

    def allocate(
        self,
        seq: Sequence,
        in_progress: Set[int] = frozenset(),
        admits: Callable[[Sequence, int], bool] | None = None,
    ) -> bool:
        """Give `seq` blocks for all its tokens, cached ones first; if False, nothing has changed.

        False if there are too few free blocks; or if the first uncached block's hash is
        `in_progress`: another sequence computes that block, and `seq` can share it later; or if
        `admits(seq, n)` is False. `seq` takes n free blocks until its tokens are computed.
        """
        assert not seq.room
        if not self.free_queue and self.num_groups:  # at least the last token's block is new
            return False
        most_hits = seq.num_skippable_tokens // self.block_size
        path = self.restorable(seq, most_hits)
        num_hits = len(path)
        if in_progress and self._is_in_progress(seq, num_hits, most_hits, in_progress):
            return False
        num_blocks = -(-seq.num_tokens // self.block_size)
        passed = self._num_passed(num_hits * self.block_size)
        hits = [
            [prefix.blocks[group][0] for prefix in path[start:]]
            for group, start in enumerate(passed)
        ]
        num_fresh = [end - num_hits for end in self._first_ends(num_blocks, passed)]
        if sum(num_fresh) + sum(map(self._num_free, hits)) > self.num_free_blocks:
            return False
        if admits and not admits(seq, self._num_taken(seq, hits, passed)):
            return False
        for group, start in enumerate(passed):
            self._renew([block for prefix in path[:start] for block in prefix.blocks[group][:1]])
        for blocks in hits:
            self._hold(blocks)
        seq.block_tables = [
            [NO_BLOCK] * start + blocks + [self._take_free() for _ in range(number)]
            for start, blocks, number in zip(passed, hits, num_fresh, strict=True)
        ]
        self._set_room(seq)
        seq.num_published_blocks = num_hits
        seq.num_passed_blocks = passed
        seq.num_cached_tokens = num_hits * self.block_size
        if seq.num_hit_tokens is None:
            seq.num_hit_tokens = seq.num_cached_tokens
        return True

    def _is_in_progress(
        self, seq: Sequence, num_hits: int, most_hits: int, in_progress: Set[int]
    ) -> bool:
        """Whether others are computing blocks with which a longer prefix could be restored."""
        if num_hits == most_hits:
            return False
        if not self.has_states:
            return seq.block_hashes[num_hits] in in_progress
        hashes = block_hashes(seq, most_hits, self.block_size)
        return not in_progress.isdisjoint(hashes[num_hits:most_hits])

    def fork(self, seq: Sequence, sibling: Sequence) -> bool:
        """Share the blocks of `seq` with `sibling`, which has the same tokens.

        If it returns False, nothing has changed. In place of a last block that is not full the
        sibling gets a new block, to which the caller copies the contents. The full blocks must be
        published before the sibling grows.
        """
        num_full = seq.num_tokens // self.block_size
        sibling.block_hashes = list(seq.block_hashes)
        if not self.num_groups:
            self._set_room(sibling)
            return True
        has_tail = num_full * self.block_size < seq.room
        if has_tail and len(self.free_queue) < self.num_groups:
            return False
        sibling.block_tables = [table[:num_full] for table in seq.block_tables]
        sibling.num_passed_blocks = list(seq.num_passed_blocks)
        sibling.room = num_full * self.block_size
        for block in sibling.held_blocks:
            self.ref_counts[block] += 1
        if has_tail:
            self.append_blocks(sibling)
        sibling.num_published_blocks = max(num_full, seq.num_published_blocks)
        return True

    def num_needed(self, seqs: list[Sequence]) -> int:
        """How many blocks `append_blocks` gives to all of these sequences together."""
        if self.num_groups == 1:
            return len(seqs)
        return sum(len(self._shortest_tables(seq)) for seq in seqs)

    def append_blocks(self, seq: Sequence) -> None:
        """Give `seq` blocks for `block_size` more tokens; the caller checked that enough are free.

        One block in each group. After a prompt a group may already have this block.
        """
        tables = seq.block_tables if self.num_groups == 1 else self._shortest_tables(seq)
        for table in tables:
            table.append(self._take_free())
        seq.room += self.block_size

    def grow(self, seq: Sequence, num_tokens: int) -> int:
        """Give `seq` blocks for its first `num_tokens`; returns how many tokens have blocks."""
        while seq.room < num_tokens and self.free_queue:
            if self.num_groups > 1 and self.num_needed([seq]) > len(self.free_queue):
                break
            self.append_blocks(seq)
        return min(num_tokens, seq.room)

    def _shortest_tables(self, seq: Sequence) -> list[list[int]]:
        """The block tables that limit `room`."""
        length = seq.room // self.block_size
        return [table for table in seq.block_tables if len(table) == length]

    def shrink(self, seq: Sequence, num_tokens: int) -> None:
        """Free the blocks of `seq` after those of its first `num_tokens`; none is published."""
        size = -(-num_tokens // self.block_size)
        if all(len(table) <= size for table in seq.block_tables):
            return
        tables = [table if len(table) <= size else table[:size] for table in seq.block_tables]
        for table, kept in zip(seq.block_tables, tables, strict=True):
            self._release(table[len(kept) :])
        seq.block_tables = tables  # new lists, so that devices get them again
        self._set_room(seq)

    def publish(self, seq: Sequence, num_computed: int) -> None:
        """Enter the full blocks among the first `num_computed` tokens of `seq` in the cache.

        A block is left out if the prefix before it has left the cache.
        """
        num_full = num_computed // self.block_size
        if not self.enable_prefix_caching or num_full <= seq.num_published_blocks:
            return
        if not self.num_groups:  # prefixes are entered with their checkpoints
            return
        hashes = block_hashes(seq, num_full, self.block_size)
        prefix = self._prefix_before(seq, seq.num_published_blocks)
        for index in range(seq.num_published_blocks, num_full):
            if prefix is None:
                break
            column = [table[index] for table in seq.block_tables]
            prefix = self.prefixes.enter(
                prefix, hashes[index], block_tokens(seq, index, self.block_size), column
            )
            for group, block in enumerate(column):
                self.published[block] = prefix
                self.group_of[block] = group
        seq.num_published_blocks = num_full

    def full_block_hashes(self, seq: Sequence) -> list[int]:
        """The hashes of all full blocks of `seq`, computed or not."""
        if not self.enable_prefix_caching:
            return []
        return block_hashes(seq, seq.num_tokens // self.block_size, self.block_size)

    def free(self, seq: Sequence) -> None:
        """Free all blocks of `seq`, last first, so that its tail is evicted before its prefix."""
        if self.num_groups == 1:
            self._release(seq.held_blocks)
        else:  # column by column, as a prefix needs a block in each group
            for column in reversed(range(max(map(len, seq.block_tables), default=0))):
                for table, start in zip(seq.block_tables, seq.num_passed_blocks, strict=True):
                    self._release(table[max(start, column) : column + 1])
        seq.release_cache()

    def pass_by(self, seq: Sequence) -> None:
        """Free the blocks of `seq` that are behind the windows of the next token to compute."""

    def prefix_of(self, seq: Sequence, num_tokens: int) -> Prefix | None:
        """The cached prefix of the first `num_tokens` of `seq`; None if there is none."""
        path = self._path(seq, num_tokens // self.block_size)
        return path[-1] if path else None

    def restorable(self, seq: Sequence, num_blocks: int) -> list[Prefix]:
        """The cached prefixes of `seq`, of up to `num_blocks`, up to one that can be restored."""
        return self._restorable(self._path(seq, num_blocks))

    def _num_passed(self, num_cached_tokens: int) -> list[int]:  # noqa: ARG002
        """For each group, how many blocks end before the window of the first uncached token."""
        return [0] * self.num_groups

    def _first_ends(self, num_blocks: int, passed: list[int]) -> list[int]:  # noqa: ARG002
        """For each group, how many of a sequence's `num_blocks` are in its table at first."""
        return [num_blocks] * self.num_groups

    def _restorable(self, path: list[Prefix]) -> list[Prefix]:
        """The longest part of a path of prefixes that all groups can restore."""
        for group in range(self.num_groups):
            gap = (index for index, prefix in enumerate(path) if not prefix.blocks[group])
            path = path[: next(gap, len(path))]
        while self.has_states and path and path[-1].checkpoint is None:
            path.pop()
        return path

    def _num_taken(self, seq: Sequence, hits: list[list[int]], passed: list[int]) -> int:
        """The free blocks that `seq` has taken once all its tokens are computed."""
        num_blocks = -(-seq.num_tokens // self.block_size)
        taken = 0
        for start, blocks, left in zip(passed, hits, self._num_passed(seq.num_tokens), strict=True):
            end = start + len(blocks)
            taken += num_blocks - max(left, end) + self._num_free(blocks[max(0, left - start) :])
        return taken

    def _set_room(self, seq: Sequence) -> None:
        """Set `room` by the shortest table. Without groups there is room for all tokens."""
        num_blocks = min(map(len, seq.block_tables), default=UNLIMITED)
        seq.room = num_blocks * self.block_size

    def _path(self, seq: Sequence, num_blocks: int) -> list[Prefix]:
        """The cached prefixes of `seq`, of up to `num_blocks` blocks."""
        if not self.enable_prefix_caching:
            return []
        return path_of(self.prefixes, seq, num_blocks, self.block_size)

    def _prefix_before(self, seq: Sequence, index: int) -> Prefix | None:
        """The prefix that the block at `index` continues; None if it has left the cache."""
        if not index:
            return self.prefixes.root(seq.root)
        return self.published[seq.block_tables[0][index - 1]]
