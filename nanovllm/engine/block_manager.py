"""BlockManager: which sequences hold which KV block, and which blocks hold a reusable prefix.

It knows block numbers and token ids, and no tensors.
"""

import sys
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Set
from itertools import count

import xxhash

from nanovllm.engine.sequence import Sequence


def kept_window(window: int, block_size: int) -> int:
    """How many tokens back a sequence keeps its blocks, if no layer attends further than `window`.

    At least a little more than a block: the last published block is the next one's parent.
    """
    return max(window, block_size + 2)


def most_held(window: int, block_size: int) -> int:
    """The most blocks that a decoding sequence holds: its window may start within a block."""
    return (kept_window(window, block_size) - 2) // block_size + 2


def longest_sequence(num_blocks: int, block_size: int, window: int | None) -> int:
    """How many tokens a sequence may have if it has the whole pool.

    As many as the pool holds; unlimited if the pool holds a window and the next token.
    """
    if window is None or most_held(window, block_size) > num_blocks:
        return num_blocks * block_size
    return sys.maxsize


def hash_block(parent_hash: int, token_ids: list[int]) -> int:
    """Hash a full block: its tokens, chained to the hash of all blocks before it."""
    data = parent_hash.to_bytes(8, "little") + array("i", token_ids).tobytes()
    return xxhash.xxh64_intdigest(data)


def block_hashes(seq: Sequence, num_blocks: int, block_size: int) -> list[int]:
    """The hashes of the first blocks of `seq`, or of more; each is computed once."""
    hashes = seq.block_hashes
    for index in range(len(hashes), num_blocks):
        parent = hashes[index - 1] if index else seq.root % (1 << 64)
        tokens = seq.token_ids[index * block_size : (index + 1) * block_size]
        hashes.append(hash_block(parent, tokens))
    return hashes


class BlockManager:
    """A pool of `num_blocks` blocks of `block_size` tokens with a prefix cache.

    A block is free (ref_count 0, in the queue once) or used (ref_count tables hold it). A published
    block can be found by a later request: the prefix before it is published, too. It keeps its hash
    until it is allocated again. The free queue (OrderedDict, a doubly linked list) is in the order
    of allocation: first the blocks that no request can find, last freed first; then those that were
    never used, whose memory a CPU does not have yet; then published ones, least recently used
    first. Of blocks with equal prefixes, one at most is free and published.

    If every layer attends to a `window` only, a sequence frees the blocks behind it: the first
    `num_passed_blocks` entries of its table are blocks that it no longer holds and that no kernel
    reads. A long prompt gets its blocks as it is computed.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        window: int | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Blocks that a sequence gets at once: with a window, those of two windows.
        self.window = self.most_at_once = sys.maxsize
        if window is not None:
            self.window = kept_window(window, block_size)
            self.most_at_once = min(num_blocks, most_held(2 * self.window, block_size))
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.hashes: list[int | None] = [None] * num_blocks
        self.token_ids: list[list[int]] = [[]] * num_blocks  # replaced, never changed in place
        # A number for each prefix (a block and all before it), and the parent's number: blocks with
        # equal tokens whose parents' hashes collide have equal hashes, and differ in this alone.
        # The parent of a first block is its sequence's root: 0, or below it for an adapter.
        self.prefixes = [0] * num_blocks
        self.parents = [0] * num_blocks
        self.prefix_numbers = count(1)
        # Equal blocks computed at one time share a hash: evicting one must not hide the others.
        self.blocks_by_hash: dict[int, list[int]] = {}
        # The published blocks after each prefix, kept with a window: there a running sequence's
        # prefix may be evicted first. Otherwise all blocks after a prefix are evicted before it.
        self.children: dict[int, set[int]] = {}

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
        assert not seq.block_table
        if not self.free_queue:  # at least the last token's block is new
            return False
        most_hits = seq.num_skippable_tokens // self.block_size
        hits = self._find_prefix(seq, most_hits)
        if in_progress and len(hits) < most_hits and seq.block_hashes[len(hits)] in in_progress:
            return False
        num_blocks = -(-seq.num_tokens // self.block_size)
        num_cached_tokens = len(hits) * self.block_size
        num_passed = self._num_passed(num_cached_tokens)
        num_fresh = min(num_blocks, num_passed + self.most_at_once) - len(hits)
        if num_fresh + self._num_free(hits[num_passed:]) > self.num_free_blocks:
            return False
        if admits:
            left = self._num_passed(seq.num_tokens)  # freed when all its tokens are computed
            num_taken = num_blocks - max(left, len(hits)) + self._num_free(hits[left:])
            if not admits(seq, num_taken):
                return False
        self._hold(hits, num_passed)
        seq.block_table = hits + [self._take_free() for _ in range(num_fresh)]
        seq.num_published_blocks = len(hits)
        seq.num_passed_blocks = num_passed
        seq.num_cached_tokens = num_cached_tokens
        if seq.num_hit_tokens is None:
            seq.num_hit_tokens = seq.num_cached_tokens
        return True

    def fork(self, seq: Sequence, sibling: Sequence) -> bool:
        """Share the blocks of `seq` with `sibling`, which has the same tokens.

        If it returns False, nothing has changed. A last block that is not full gets a block of its
        own, which the caller copies; the others must be published before the sibling grows.
        """
        num_full = seq.num_tokens // self.block_size
        has_tail = num_full < len(seq.block_table)
        if has_tail and not self.free_queue:
            return False
        sibling.block_table = seq.block_table[:num_full]
        sibling.num_passed_blocks = seq.num_passed_blocks
        for block in sibling.held_blocks:
            self.ref_counts[block] += 1
        if has_tail:
            sibling.block_table.append(self._take_free())
        sibling.block_hashes = list(seq.block_hashes)
        sibling.num_published_blocks = max(num_full, seq.num_published_blocks)
        return True

    def append_block(self, seq: Sequence) -> None:
        """Give `seq` one more block; the caller has checked that one is free."""
        seq.block_table.append(self._take_free())

    def grow(self, seq: Sequence, num_tokens: int) -> int:
        """Give `seq` blocks for its first `num_tokens`; returns how many tokens have blocks."""
        while self.free_queue and len(seq.block_table) * self.block_size < num_tokens:
            self.append_block(seq)
        return min(num_tokens, len(seq.block_table) * self.block_size)

    def shrink(self, seq: Sequence, num_tokens: int) -> None:
        """Free the blocks of `seq` after those of its first `num_tokens`; none is published."""
        size = -(-num_tokens // self.block_size)
        if size < len(seq.block_table):
            self._release(seq.block_table[size:])
            seq.block_table = seq.block_table[:size]  # a new list, so that devices get it again

    def pass_by(self, seq: Sequence) -> None:
        """Free the blocks of `seq` that are behind the window of the next token to compute.

        Called before a step's tokens are appended: tokens in flight come after these blocks.
        """
        start, end = seq.num_passed_blocks, self._num_passed(seq.num_cached_tokens)
        if end > start:
            self.publish(seq, min(seq.num_cached_tokens, seq.num_known_tokens))
            self._release(seq.block_table[start:end])
            seq.num_passed_blocks = end

    def publish(self, seq: Sequence, num_computed: int) -> None:
        """Enter the full blocks among the first `num_computed` tokens of `seq` in the cache.

        Except those whose prefix has left it.
        """
        num_full = num_computed // self.block_size
        if not self.enable_prefix_caching or num_full <= seq.num_published_blocks:
            return
        hashes = block_hashes(seq, num_full, self.block_size)
        for index in range(seq.num_published_blocks, num_full):
            block, value, tokens = seq.block_table[index], hashes[index], self._tokens(seq, index)
            before = seq.block_table[index - 1]
            if index and self.hashes[before] is None:
                break
            parent = self.prefixes[before] if index else seq.root
            twin = self._find_block(value, parent, tokens)
            number = next(self.prefix_numbers) if twin is None else self.prefixes[twin]
            self.hashes[block], self.token_ids[block] = value, tokens
            self.parents[block], self.prefixes[block] = parent, number
            self.blocks_by_hash.setdefault(value, []).append(block)
            if self.window < sys.maxsize:
                self.children.setdefault(parent, set()).add(block)
        seq.num_published_blocks = num_full

    def full_block_hashes(self, seq: Sequence) -> list[int]:
        """The hashes of all full blocks of `seq`, computed or not."""
        if not self.enable_prefix_caching:
            return []
        return block_hashes(seq, seq.num_tokens // self.block_size, self.block_size)

    def free(self, seq: Sequence) -> None:
        """Free all blocks of `seq`, last first, so that its tail is evicted before its prefix.

        The blocks behind its window are part of that prefix: those that are still cached are moved
        behind the others in the queue.
        """
        self._release(seq.held_blocks)
        self._renew(self._find_prefix(seq, seq.num_passed_blocks))
        seq.release_cache()

    def clear(self) -> None:
        """Remove all blocks from the cache. Sequences keep theirs."""
        for block, value in enumerate(self.hashes):
            if value is not None:
                self._unpublish(block)

    def audit(self, block_tables: list[list[int]]) -> None:
        """Assert the pool's invariants, given the held blocks of every block table."""
        held = Counter(block for table in block_tables for block in table)
        for table in block_tables:
            assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
        for block, ref_count in enumerate(self.ref_counts):
            assert ref_count == held[block], f"block {block}: {ref_count} != {held[block]} tables"
            assert (block in self.free_queue) == (ref_count == 0), f"block {block} is misplaced"
        published = sorted(block for group in self.blocks_by_hash.values() for block in group)
        assert published == [b for b, value in enumerate(self.hashes) if value is not None]
        for value, group in self.blocks_by_hash.items():
            assert group and all(self.hashes[block] == value for block in group)
        prefixes = {self.prefixes[block] for block in published}
        parents = {self.parents[block] for block in published}
        assert all(parent <= 0 or parent in prefixes for parent in parents), "a lost parent"
        order = [self.hashes[block] is not None for block in self.free_queue]
        assert order == sorted(order), "a cached block comes before one that cannot be found"
        free = [self.prefixes[block] for block in published if block in self.free_queue]
        assert len(set(free)) == len(free), "a prefix is cached twice"

    def _num_passed(self, num_cached_tokens: int) -> int:
        """How many blocks end before the window of the first uncached token."""
        return max(0, (num_cached_tokens + 1 - self.window) // self.block_size)

    def _num_free(self, blocks: list[int]) -> int:
        return sum(self.ref_counts[block] == 0 for block in blocks)

    def _hold(self, hits: list[int], num_passed: int) -> None:
        """Hold the hits, except those behind the window, which stay in the queue."""
        self._renew(hits[:num_passed])
        for block in hits[num_passed:]:
            if self.ref_counts[block] == 0:
                del self.free_queue[block]
            self.ref_counts[block] += 1

    def _renew(self, blocks: list[int]) -> None:
        """Move the free ones to the end of the queue, as if they were freed now."""
        for block in reversed(blocks):
            if self.ref_counts[block] == 0:
                self.free_queue.move_to_end(block)

    def _release(self, blocks: list[int]) -> None:
        """Drop a reference to each, last first; of equal blocks the last in the cache stays."""
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_queue[block] = None
                if self.hashes[block] is None:
                    self.free_queue.move_to_end(block, last=False)
                elif (twin := self._twin(block)) is not None:
                    self._unpublish(block)
                    self._renew([twin])

    def _twin(self, block: int) -> int | None:
        """Another published block with the same prefix."""
        value = self.hashes[block]
        assert value is not None
        for other in self.blocks_by_hash[value]:
            if other != block and self.prefixes[other] == self.prefixes[block]:
                return other
        return None

    def _unpublish(self, block: int) -> None:
        """Remove a block from the cache, and with the last one of a prefix all that follow it."""
        removed = [block]
        for block in removed:
            if self.children:
                self.children.get(self.parents[block], set()).discard(block)
                if self._twin(block) is None:
                    removed += self.children.pop(self.prefixes[block], ())
            value = self.hashes[block]
            assert value is not None
            group = self.blocks_by_hash[value]
            group.remove(block)
            if not group:
                del self.blocks_by_hash[value]
            self.hashes[block] = None
            self.token_ids[block] = []
            if self.ref_counts[block] == 0:
                self.free_queue.move_to_end(block, last=False)

    def _find_prefix(self, seq: Sequence, num_blocks: int) -> list[int]:
        """The cached blocks among the first `num_blocks` of `seq`; hashes one more, if there is."""
        hits: list[int] = []
        parent = seq.root
        for index in range(num_blocks if self.enable_prefix_caching else 0):
            value = block_hashes(seq, index + 1, self.block_size)[index]
            block = self._find_block(value, parent, self._tokens(seq, index))
            if block is None:
                break
            hits.append(block)
            parent = self.prefixes[block]
        return hits

    def _find_block(self, value: int, parent: int, token_ids: list[int]) -> int | None:
        for block in self.blocks_by_hash.get(value, ()):
            if self.parents[block] == parent and self.token_ids[block] == token_ids:
                return block
        return None

    def _tokens(self, seq: Sequence, index: int) -> list[int]:
        return seq.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def _take_free(self) -> int:
        """Allocate the first free block, and remove it from the cache."""
        block, _ = self.free_queue.popitem(last=False)
        self.ref_counts[block] = 1
        if self.hashes[block] is not None:
            self._unpublish(block)
        return block
