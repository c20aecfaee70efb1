"""Branches: up to where sequences share their tokens, found by the hashes of blocks.

The hash of a block is chained to all blocks before it: two sequences that have a hash in common
begin alike up to there. A collision of hashes makes a checkpoint that is not used, and no error.
"""

from collections import Counter, OrderedDict, deque
from itertools import islice

from nanovllm.engine.cache.block_manager import BlockManager
from nanovllm.engine.cache.prefixes import Prefix, block_hashes, path_of
from nanovllm.engine.schedule.sequence import Sequence

LOOK_AHEAD = 32  # waiting sequences with which one that begins is compared
MOST_BRANCHES = 4  # of a sequence and others, for each time that it begins
MOST_SEEN = 1 << 16  # hashes that are kept of prompts, if there are no blocks that have them


def num_equal_blocks(one: Sequence, other: Sequence, least: int, block_size: int) -> int:
    """How many blocks both begin with, as far as `other` can skip them; 0 if at most `least`.

    Costs one comparison if so, else two for each power of 2 up to the number.
    """
    most = min(one.num_tokens, other.num_skippable_tokens) // block_size

    def are_equal(number: int) -> bool:
        hashes = (block_hashes(seq, number, block_size)[number - 1] for seq in (one, other))
        return next(hashes) == next(hashes)

    low, step = least + 1, 1
    if low > most or not are_equal(low):
        return 0
    while low + step <= most and are_equal(low + step):
        low, step = low + step, 2 * step
    high = min(low + step, most + 1)  # the first blocks that are not equal, or not compared
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if are_equal(middle) else (low, middle)
    return low


def is_leaf(prefix: Prefix) -> bool:
    """Whether no cached prefix continues this one, which has KV blocks."""
    return prefix.num_uses == sum(map(len, prefix.blocks)) + (prefix.checkpoint is not None)


class Branches:
    """At which lengths running sequences shall leave checkpoints for others that share them.

    `lengths` has them by `seq_id`, and whether the checkpoint may be superseded: it may if the
    tokens of an earlier sequence end there, as in the next turn of a conversation.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks, self.block_size = blocks, blocks.block_size
        self.lengths: dict[int, dict[int, bool]] = {}
        self._begun: dict[int, Sequence] = {}  # by the hash of the first block that each computes
        self._keys: dict[int, int] = {}  # of `_begun`, by `seq_id`
        self._seen: OrderedDict[int, None] = OrderedDict()

    def find(self, seq: Sequence, waiting: deque[Sequence] | None) -> None:
        """Set the lengths for `seq`, which begins: what it shares with cached or waiting tokens."""
        size = self.block_size
        num_hits = seq.num_cached_tokens // size
        lengths = self._shared_with_waiting(seq, num_hits, waiting)
        known, is_end = self._num_known(seq)
        if known > num_hits:
            lengths.setdefault(known * size, is_end)
        self.lengths[seq.seq_id] = lengths
        if len(hashes := block_hashes(seq, seq.num_tokens // size, size)) > num_hits:
            self._keys[seq.seq_id] = hashes[num_hits]
            self._begun[hashes[num_hits]] = seq

    def joins_later(self, seq: Sequence) -> bool:
        """Whether `seq` should wait, as a prompt in progress is about to compute what both share.

        That sequence then leaves a checkpoint at the end of it.
        """
        size, most = self.block_size, seq.num_skippable_tokens // self.block_size
        if not self._begun:
            return False
        for value in block_hashes(seq, most, size)[:most]:
            other = self._begun.get(value)
            if other is None:
                continue
            if not (other.room and other.is_prefilling):
                del self._begun[value]
                continue
            number = num_equal_blocks(other, seq, other.num_cached_tokens // size, size)
            lengths = self.lengths[other.seq_id]
            if not number or number * size in lengths or len(lengths) >= MOST_BRANCHES:
                continue
            if number > len(self.blocks.restorable(seq, most)):
                lengths[number * size] = False
                return True
        return False

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence that no longer runs."""
        self.lengths.pop(seq.seq_id, None)
        value = self._keys.pop(seq.seq_id, None)
        if value is not None and self._begun.get(value) is seq:
            del self._begun[value]

    def clear(self) -> None:
        """Forget the prompts that were seen. No sequence that runs now leaves a branch."""
        self._seen.clear()
        self._begun.clear()
        for lengths in self.lengths.values():
            lengths.clear()

    def _shared_with_waiting(
        self, seq: Sequence, num_hits: int, waiting: deque[Sequence] | None
    ) -> dict[int, bool]:
        """The lengths that the next waiting sequences share with `seq`: those of most of them."""
        if waiting is None:
            return {}
        start = waiting.index(seq) + 1
        numbers = Counter(
            num_equal_blocks(seq, other, num_hits, self.block_size)
            for other in islice(waiting, start, start + LOOK_AHEAD)
            if other.root == seq.root
        )
        del numbers[0]
        return {n * self.block_size: False for n, _ in numbers.most_common(MOST_BRANCHES)}

    def _num_known(self, seq: Sequence) -> tuple[int, bool]:
        """How many first blocks of `seq` are known from others, and whether these end there."""
        most = seq.num_skippable_tokens // self.block_size
        if self.blocks.num_groups:
            path = path_of(self.blocks.prefixes, seq, most, self.block_size)
            return len(path), bool(path) and is_leaf(path[-1])
        hashes = block_hashes(seq, seq.num_tokens // self.block_size, self.block_size)
        number = next((i for i, value in enumerate(hashes[:most]) if value not in self._seen), most)
        for value in reversed(hashes):  # the first ones are kept for longest
            self._seen[value] = None
            self._seen.move_to_end(value)
        while len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        return number, False
