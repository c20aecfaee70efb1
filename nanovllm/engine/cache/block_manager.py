"""BlockManager: which sequences hold which KV block, and which blocks hold a reusable prefix.

It knows block numbers and token ids, and no tensors.
"""

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Set
from typing import NamedTuple

from nanovllm.engine.cache.prefixes import Prefix, Prefixes, block_hashes
from nanovllm.engine.schedule.sequence import Sequence

Window = int | None  # how many tokens back a group's layers attend; None for all
UNLIMITED = 1 << 40  # blocks, more than any sequence has
NO_BLOCK = 0  # stands in a table for a block behind the window, which no kernel reads


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


class FreeBlocks(NamedTuple):
    """The KV blocks that sequences may take."""

    number: int
    block_size: int
    most_held: tuple[int, ...]  # for each cache group, the most blocks that a sequence grows to


class BlockManager:
    """A pool of `num_blocks` blocks of `block_size` tokens with a prefix cache.

    Layers that attend equally far back form a group, and a sequence has a block table for each
    group. All groups take blocks from the same pool, so that none is idle.

    A block is free (ref_count 0, in the queue once) or used (ref_count tables hold it). A published
    block can be found by a later request that has the same tokens up to its end. It keeps its
    prefix until it is allocated again. The free queue (OrderedDict, a doubly linked list) is in
    the order of allocation: first the blocks that no request can find, last freed first; then
    those that were never used, whose memory a CPU does not have yet; then published ones, least
    recently used first. Of a group's blocks with equal prefixes, one at most is free and published.

    In a group with a window a sequence frees the blocks behind it: the first `num_passed_blocks`
    entries of its table are blocks that it no longer holds and that no kernel reads. There a long
    prompt gets its blocks as it is computed.

    If the model `has_states`, a prefix can be restored only where it has a checkpoint.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        windows: tuple[Window, ...] = (None,),
        has_states: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = windows
        self.num_groups = len(windows)  # blocks that a sequence needs for `block_size` tokens
        self.has_states = has_states
        self.has_windows = any(window is not None for window in windows)
        self._kept = [sys.maxsize if w is None else kept_window(w, block_size) for w in windows]
        # The most blocks that a decoding sequence holds in each group; and those that a long prompt
        # gets at once, with a window those of two windows, or of one if there are no more.
        self.most_held = tuple(most_held(window, block_size) for window in windows)
        self._most_at_once = [
            limit if window is None else most_held(2 * kept, block_size)
            for window, limit, kept in zip(windows, self.most_held, self._kept, strict=True)
        ]
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.prefixes = Prefixes()
        self.published: list[Prefix | None] = [None] * num_blocks
        self.group_of = [0] * num_blocks  # of a published block

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return len(self.free_queue)

    def allocate(
        self,
        seq: Sequence,
        in_progress: Set[int] = frozenset(),
        admits: Callable[[Sequence, int], bool] | None = None,
    ) -> bool:
        """Give `seq` blocks for all its tokens, cached ones first; if False, nothing has changed.

        With a window it gets the blocks of two windows at most; `grow` adds the others.

        False also if the first uncached block's hash is `in_progress` (another sequence computes
        it, and waiting shares it), and if `admits(seq, n)` is False, where n is the number of free
        blocks that `seq` has taken once its tokens are computed.
        """
        assert not seq.room
        if not self.free_queue and self.num_groups:  # at least the last token's block is new
            return False
        most_hits = seq.num_skippable_tokens // self.block_size
        path = self._find(seq, most_hits)
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
        """Whether a longer prefix of `seq` can be restored when others have been computed."""
        if num_hits == most_hits:
            return False
        if not self.has_states:
            return seq.block_hashes[num_hits] in in_progress
        hashes = block_hashes(seq, most_hits, self.block_size)
        return not in_progress.isdisjoint(hashes[num_hits:most_hits])

    def fork(self, seq: Sequence, sibling: Sequence) -> bool:
        """Share the blocks of `seq` with `sibling`, which has the same tokens.

        If it returns False, nothing has changed. A last block that is not full gets a block of its
        own, which the caller copies; the others must be published before the sibling grows.
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
        """The blocks that `append_blocks` gives to all of these."""
        if self.num_groups == 1:
            return len(seqs)
        return sum(len(self._shortest_tables(seq)) for seq in seqs)

    def append_blocks(self, seq: Sequence) -> None:
        """Give `seq` blocks for `block_size` more tokens; the caller checked that enough are free.

        One in each group, except that a group may have its own already after a prompt.
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

    def pass_by(self, seq: Sequence) -> None:
        """Free the blocks of `seq` that are behind the window of the next token to compute.

        Called before a step's tokens are appended: tokens in flight come after these blocks.
        Those of a prompt may be found again; those of generated tokens are reused first, so that a
        long answer takes the place of its own beginning.
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

        Except the last one: a request that continues the last full block reads it.
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

    def publish(self, seq: Sequence, num_computed: int) -> None:
        """Enter the full blocks among the first `num_computed` tokens of `seq` in the cache.

        Except those whose prefix has left it.
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
            prefix = self.prefixes.enter(prefix, hashes[index], self._tokens(seq, index), column)
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
        """Free all blocks of `seq`, last first, so that its tail is evicted before its prefix.

        The blocks behind its windows are part of that prefix: those that are still cached are moved
        behind the others in the queue.
        """
        if self.num_groups == 1:
            self._release(seq.held_blocks)
        else:  # of all groups together, as a prefix needs a block in each
            for column in reversed(range(max(map(len, seq.block_tables), default=0))):
                for table, start in zip(seq.block_tables, seq.num_passed_blocks, strict=True):
                    self._release(table[max(start, column) : column + 1])
        if most := max(seq.num_passed_blocks, default=0):
            path = self._path(seq, most)
            for group, end in enumerate(seq.num_passed_blocks):
                self._renew([block for prefix in path[:end] for block in prefix.blocks[group][:1]])
        seq.release_cache()

    def clear(self) -> None:
        """Remove all blocks from the cache. Sequences keep theirs."""
        for block, prefix in enumerate(self.published):
            if prefix is not None:
                self._unpublish(block)

    def prefix_of(self, seq: Sequence, num_tokens: int) -> Prefix | None:
        """The cached prefix of the first `num_tokens` of `seq`; None if there is none."""
        path = self._path(seq, num_tokens // self.block_size)
        return path[-1] if path else None

    def audit(self, block_tables: list[list[int]], others: Counter[int] | None = None) -> None:
        """Assert the pool's invariants, given the held blocks of every block table.

        `others` counts uses of prefixes for other things than blocks, by their `id`.
        """
        held = Counter(block for table in block_tables for block in table)
        for table in block_tables:
            assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
        for block, ref_count in enumerate(self.ref_counts):
            assert ref_count == held[block], f"block {block}: {ref_count} != {held[block]} tables"
            assert (block in self.free_queue) == (ref_count == 0), f"block {block} is misplaced"
        self.prefixes.audit(others or Counter())
        entered = []
        for prefix in self.prefixes:
            for group, blocks in enumerate(prefix.blocks):
                entered += [*blocks]
                assert all(self.published[block] is prefix for block in blocks)
                assert all(self.group_of[block] == group for block in blocks)
                free = [block for block in blocks if block in self.free_queue]
                assert len(free) <= 1, "a prefix is cached twice"
                if blocks and self.windows[group] is None:
                    parent = prefix.parent
                    assert parent is not None
                    assert parent.parent is None or parent.blocks[group], "a lost parent"
        assert sorted(entered) == [b for b, p in enumerate(self.published) if p is not None]
        order = [self.published[block] is not None for block in self.free_queue]
        assert order == sorted(order), "a cached block comes before one that cannot be found"

    def _num_passed(self, num_cached_tokens: int) -> list[int]:
        """For each group, how many blocks end before the window of the first uncached token."""
        size = self.block_size
        return [max(0, (num_cached_tokens + 1 - kept) // size) for kept in self._kept]

    def _first_ends(self, num_blocks: int, passed: list[int]) -> list[int]:
        """For each group, how many of a sequence's `num_blocks` are in its table at first."""
        ends: list[int] = []
        for limits in (self._most_at_once, self.most_held):
            ends = [
                min(num_blocks, start + limit) for start, limit in zip(passed, limits, strict=True)
            ]
            if sum(ends) - sum(passed) <= self.num_blocks:
                break
        return ends

    def _num_taken(self, seq: Sequence, hits: list[list[int]], passed: list[int]) -> int:
        """The free blocks that `seq` has taken once all its tokens are computed."""
        num_blocks = -(-seq.num_tokens // self.block_size)
        taken = 0
        for start, blocks, left in zip(passed, hits, self._num_passed(seq.num_tokens), strict=True):
            end = start + len(blocks)
            taken += num_blocks - max(left, end) + self._num_free(blocks[max(0, left - start) :])
        return taken

    def _set_room(self, seq: Sequence) -> None:
        """Without groups there is room for any number of tokens."""
        num_blocks = min(map(len, seq.block_tables), default=UNLIMITED)
        seq.room = num_blocks * self.block_size

    def _num_free(self, blocks: list[int]) -> int:
        return sum(self.ref_counts[block] == 0 for block in blocks)

    def _hold(self, blocks: list[int]) -> None:
        """Take a reference to each of these cached blocks."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self.free_queue[block]
            self.ref_counts[block] += 1

    def _renew(self, blocks: Iterable[int]) -> None:
        """Move the free ones to the end of the queue, as if they were freed now."""
        for block in reversed([*blocks]):
            if self.ref_counts[block] == 0:
                self.free_queue.move_to_end(block)

    def _release(self, blocks: list[int]) -> None:
        """Drop a reference to each, last first; of equal blocks the last in the cache stays."""
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_queue[block] = None
                prefix = self.published[block]
                if prefix is None:
                    self.free_queue.move_to_end(block, last=False)
                elif len(prefix.blocks[group := self.group_of[block]]) > 1:
                    self._unpublish(block)
                    self._renew(prefix.blocks[group][:1])

    def _unpublish(self, block: int) -> None:
        """Remove a block from the cache."""
        prefix = self.published[block]
        assert prefix is not None
        self.prefixes.remove(prefix, self.group_of[block], block)
        self.published[block] = None
        if self.ref_counts[block] == 0:
            self.free_queue.move_to_end(block, last=False)

    def _find(self, seq: Sequence, num_blocks: int) -> list[Prefix]:
        """The longest prefix of `seq`, of up to `num_blocks` blocks, that all groups have cached.

        A group with a window needs the blocks that the next token attends to, and no others.
        """
        path = self._path(seq, num_blocks)
        for group, window in enumerate(self.windows):
            if window is None:
                gap = (index for index, prefix in enumerate(path) if not prefix.blocks[group])
                path = path[: next(gap, len(path))]
        if not self.has_windows:
            while self.has_states and path and path[-1].checkpoint is None:
                path.pop()
            return path
        runs = [0] * self.num_groups  # how many blocks before the end each group has cached
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

    def _path(self, seq: Sequence, num_blocks: int) -> list[Prefix]:
        """The known prefixes of `seq`, of up to `num_blocks` blocks; hashes one block more."""
        path: list[Prefix] = []
        prefix = self.prefixes.roots.get(seq.root)
        for index in range(num_blocks if self.enable_prefix_caching else 0):
            value = block_hashes(seq, index + 1, self.block_size)[index]
            if prefix is not None:
                prefix = self.prefixes.find(prefix, value, self._tokens(seq, index))
            if prefix is None:
                break
            path.append(prefix)
        return path

    def _prefix_before(self, seq: Sequence, index: int) -> Prefix | None:
        """The prefix that the block at `index` continues; None if it has left the cache."""
        if not index:
            return self.prefixes.root(seq.root)
        return self.published[seq.block_tables[0][index - 1]]

    def _tokens(self, seq: Sequence, index: int) -> tuple[int, ...]:
        return tuple(seq.token_ids[index * self.block_size : (index + 1) * self.block_size])

    def _take_free(self) -> int:
        """Allocate the first free block, and remove it from the cache."""
        block, _ = self.free_queue.popitem(last=False)
        self.ref_counts[block] = 1
        if self.published[block] is not None:
            self._unpublish(block)
        return block
