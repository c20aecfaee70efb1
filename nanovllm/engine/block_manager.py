"""BlockManager: who owns which KV block, and which blocks hold a prefix that can be used again.

It knows block numbers and token ids, no tensors: what a block holds on the device is the runner's.
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

    A little more than a block at least: the block that was published last is the next one's parent.
    """
    return max(window, block_size + 2)


def most_held(window: int, block_size: int) -> int:
    """The most blocks that a sequence holds as it decodes: its window begins and ends anywhere."""
    return (kept_window(window, block_size) - 2) // block_size + 2


def longest_sequence(num_blocks: int, block_size: int, window: int | None) -> int:
    """How many tokens a sequence may have that has the whole pool for itself.

    As many as the pool holds; if that is a window and the next token, there is no end to it.
    """
    if window is None or most_held(window, block_size) > num_blocks:
        return num_blocks * block_size
    return sys.maxsize


def hash_block(parent_hash: int, token_ids: list[int]) -> int:
    """Hash a full block: its tokens, chained to all that stand before them."""
    data = parent_hash.to_bytes(8, "little") + array("i", token_ids).tobytes()
    return xxhash.xxh64_intdigest(data)


class BlockManager:
    """A pool of `num_blocks` blocks of `block_size` tokens with a prefix cache.

    A block is free (ref_count 0, in the queue once) or used (ref_count tables hold it). The free
    queue is a doubly linked list (OrderedDict), least recently used first; a free block keeps its
    hash until it is handed out again, so that a later request can find it there.

    If all layers attend to a `window` of the context only, a sequence gives back what it has passed
    by: the first `num_passed_blocks` of its table are numbers of blocks that it holds no longer,
    and that no kernel reads through it. A long prompt is given blocks as it is computed.
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
        # What a sequence is given at once: with a window two of them, for chunks as long as one.
        self.window = self.most_at_once = sys.maxsize
        if window is not None:
            self.window = kept_window(window, block_size)
            self.most_at_once = min(num_blocks, most_held(2 * self.window, block_size))
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.hashes: list[int | None] = [None] * num_blocks
        self.token_ids: list[list[int]] = [[]] * num_blocks  # replaced, never changed in place
        # A number for each prefix (a block and all before it), and that of a block's parent: equal
        # tokens behind parents that collide collide for certain, and only these tell them apart.
        self.prefixes = [0] * num_blocks
        self.parents = [0] * num_blocks
        self.prefix_numbers = count(1)
        # Blocks computed side by side carry one hash: evicting one must not hide the others.
        self.blocks_by_hash: dict[int, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now."""
        return len(self.free_queue)

    def allocate(
        self,
        seq: Sequence,
        in_progress: Set[int] = frozenset(),
        admits: Callable[[Sequence, int], bool] | None = None,
    ) -> bool:
        """Give `seq` blocks for all its tokens, cached ones first; False changes nothing.

        With a window it is given no more than two windows of them; the others are for `grow`.

        False also where the first block that is not cached is `in_progress`, by its hash: somebody
        else is computing it, and to wait is to share; and where `admits` says no, which is asked
        with the number of free blocks that it has taken when its tokens are computed.
        """
        assert not seq.block_table
        if not self.free_queue:  # at least the last token's block is a fresh one
            return False
        hits = self._find_prefix(seq) if self.enable_prefix_caching else []
        if in_progress and self._next_hash(seq, len(hits)) in in_progress:
            return False
        num_blocks = -(-seq.num_tokens // self.block_size)
        num_cached_tokens = len(hits) * self.block_size
        num_passed = self._num_passed(num_cached_tokens)
        num_fresh = min(num_blocks, num_passed + self.most_at_once) - len(hits)
        if num_fresh + self._num_free(hits[num_passed:]) > self.num_free_blocks:
            return False
        if admits:
            left = self._num_passed(seq.num_tokens)  # behind, when all its tokens are computed
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

    def fork(self, seq: Sequence, follower: Sequence) -> bool:
        """Give `follower` the blocks of `seq`, whose tokens are its own; False changes nothing.

        A last block that is not full is one of its own, to be copied; the others must have been
        published by the time that the follower grows.
        """
        num_full = seq.num_tokens // self.block_size
        has_tail = num_full < len(seq.block_table)
        if has_tail and not self.free_queue:
            return False
        follower.block_table = seq.block_table[:num_full]
        follower.num_passed_blocks = seq.num_passed_blocks
        for block in follower.held_blocks:
            self.ref_counts[block] += 1
        if has_tail:
            follower.block_table.append(self._take_free())
        follower.block_hashes = list(seq.block_hashes)
        follower.num_published_blocks = num_full
        return True

    def append_block(self, seq: Sequence) -> None:
        """Give `seq` one more block; the caller has seen that there is a free one."""
        seq.block_table.append(self._take_free())

    def grow(self, seq: Sequence, num_tokens: int) -> int:
        """Give `seq` blocks for its first `num_tokens`; returns how many there are blocks for."""
        while self.free_queue and len(seq.block_table) * self.block_size < num_tokens:
            self.append_block(seq)
        return min(num_tokens, len(seq.block_table) * self.block_size)

    def pass_by(self, seq: Sequence) -> None:
        """Take from `seq` the blocks behind the window of the next token that is to be computed.

        Before a step's tokens are appended: those that are on their way stand behind these blocks.
        """
        start, end = seq.num_passed_blocks, self._num_passed(seq.num_cached_tokens)
        if end > start:
            self.publish(seq, min(seq.num_cached_tokens, seq.num_known_tokens))
            self._release(seq.block_table[start:end])
            seq.num_passed_blocks = end

    def publish(self, seq: Sequence, num_computed: int) -> None:
        """Let others find the full blocks among the first `num_computed` tokens of `seq`."""
        num_full = num_computed // self.block_size
        if not self.enable_prefix_caching or num_full <= seq.num_published_blocks:
            return
        hashes = self._block_hashes(seq, num_full)
        for index in range(seq.num_published_blocks, num_full):
            block, value = seq.block_table[index], hashes[index]
            parent = self.prefixes[seq.block_table[index - 1]] if index else 0
            twin = self._find_block(value, parent, self._tokens(seq, index))
            self.hashes[block] = value
            self.token_ids[block] = self._tokens(seq, index)
            self.parents[block] = parent
            self.prefixes[block] = (
                next(self.prefix_numbers) if twin is None else self.prefixes[twin]
            )
            self.blocks_by_hash.setdefault(value, []).append(block)
        seq.num_published_blocks = num_full

    def full_block_hashes(self, seq: Sequence) -> list[int]:
        """The hashes under which others will find the full blocks of `seq`, computed or not."""
        if not self.enable_prefix_caching:
            return []
        return self._block_hashes(seq, seq.num_tokens // self.block_size)

    def free(self, seq: Sequence) -> None:
        """Take all blocks from `seq`, last first, so that its tail is evicted before its prefix.

        What it passed by is that prefix: as far as nobody has taken it, it goes with the others.
        """
        passed = zip(seq.block_table[: seq.num_passed_blocks], seq.block_hashes, strict=False)
        self._release(seq.held_blocks)
        self._renew([block for block, value in passed if self.hashes[block] == value])
        seq.forget_cache()

    def audit(self, block_tables: list[list[int]]) -> None:
        """Assert the pool's invariants, given what is held of every block table that there is."""
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

    def _num_passed(self, num_cached_tokens: int) -> int:
        """How many blocks end before the window of the token behind those that are cached."""
        return max(0, (num_cached_tokens + 1 - self.window) // self.block_size)

    def _num_free(self, blocks: list[int]) -> int:
        return sum(self.ref_counts[block] == 0 for block in blocks)

    def _hold(self, hits: list[int], num_passed: int) -> None:
        """Take hits out of the queue, where those that were passed by stay."""
        self._renew(hits[:num_passed])
        for block in hits[num_passed:]:
            if self.ref_counts[block] == 0:
                del self.free_queue[block]
            self.ref_counts[block] += 1

    def _renew(self, blocks: list[int]) -> None:
        """Let those that are free be evicted as if they were just given back."""
        for block in reversed(blocks):
            if self.ref_counts[block] == 0:
                self.free_queue.move_to_end(block)

    def _release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_queue[block] = None

    def _find_prefix(self, seq: Sequence) -> list[int]:
        """The cached blocks that `seq` starts with, as far as it needs no logits of theirs."""
        hits: list[int] = []
        parent = 0
        for index in range(seq.num_skippable_tokens // self.block_size):
            value = self._block_hashes(seq, index + 1)[index]
            block = self._find_block(value, parent, self._tokens(seq, index))
            if block is None:
                break
            hits.append(block)
            parent = self.prefixes[block]
        return hits

    def _next_hash(self, seq: Sequence, num_hits: int) -> int | None:
        """The hash of the first block of `seq` that was not found and could have been."""
        if num_hits == seq.num_skippable_tokens // self.block_size:
            return None
        return self._block_hashes(seq, num_hits + 1)[num_hits]

    def _find_block(self, value: int, parent: int, token_ids: list[int]) -> int | None:
        for block in self.blocks_by_hash.get(value, ()):
            if self.parents[block] == parent and self.token_ids[block] == token_ids:
                return block
        return None

    def _block_hashes(self, seq: Sequence, num_blocks: int) -> list[int]:
        """The hashes of the first blocks of `seq`, each computed once in its life."""
        hashes = seq.block_hashes
        for index in range(len(hashes), num_blocks):
            parent = hashes[index - 1] if index else 0
            hashes.append(hash_block(parent, self._tokens(seq, index)))
        return hashes

    def _tokens(self, seq: Sequence, index: int) -> list[int]:
        return seq.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def _take_free(self) -> int:
        """Hand out the least recently used free block; what it held can no longer be found."""
        block, _ = self.free_queue.popitem(last=False)
        self.ref_counts[block] = 1
        value = self.hashes[block]
        if value is not None:
            group = self.blocks_by_hash[value]
            group.remove(block)
            if not group:
                del self.blocks_by_hash[value]
            self.hashes[block] = None
            self.token_ids[block] = []
        return block
