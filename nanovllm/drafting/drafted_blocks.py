"""DraftedBlocks: a record of the blocks that have a draft model's KV. It knows no tensors."""

from typing import NamedTuple
from weakref import WeakKeyDictionary

from nanovllm.engine.cache.prefixes import block_hashes
from nanovllm.engine.schedule.sequence import Sequence


class Missing(NamedTuple):
    """Known tokens [start, end) of a sequence that the draft model has to compute."""

    seq: Sequence
    row: int
    start: int
    end: int


class DraftedBlocks:
    """For each block: the hash of its tokens, or the sequence that owns it and its place there.

    The draft model's pool has the block numbers of the model's pool. A block of a cached prefix, of
    a prompt that forks share, or of a preempted sequence may already be computed: it is, if its
    record equals what the sequence would record. The draft model computes the first `longest`
    tokens.

    A place in the record does not say how many tokens were computed there. `num_seen` says it for
    the sequence's latest blocks; an earlier block at the same place has fewer.
    """

    def __init__(self, block_size: int, longest: int) -> None:
        self.longest = longest
        self._block_size = block_size
        self._records: dict[int, int | tuple[int, int]] = {}
        self._last_tables: WeakKeyDictionary[Sequence, list[int]] = WeakKeyDictionary()

    def complete(self, seq: Sequence, num_seen: int, end: int) -> int:
        """Record that the first `end` tokens are computed; returns how many already were.

        The first `num_seen` were computed when the sequence last had drafts. All blocks without
        useful KV become the sequence's own.
        """
        size, table = self._block_size, seq.block_table
        last = self._last_tables.get(seq, [])
        self._last_tables[seq] = table
        hashes = block_hashes(seq, end // size, size)[: end // size]
        num_full = num_own = seq.num_passed_blocks[0]
        for index in range(num_own, len(table)):
            record = self._records.get(table[index])
            if index < len(hashes) and record == hashes[index]:
                num_full += num_full == index
            elif record != (seq.seq_id, index) or last[index : index + 1] != [table[index]]:
                break
            num_own = index + 1
        self.claim(seq, num_own)
        for index in range(seq.num_passed_blocks[0], len(hashes)):
            self._records[table[index]] = hashes[index]
        return max(num_full * size, min(num_seen, num_own * size))

    def claim(self, seq: Sequence, start: int) -> None:
        """Record that the blocks of its table from `start` on are the sequence's own."""
        for index in range(start, len(seq.block_table)):
            self._records[seq.block_table[index]] = seq.seq_id, index
