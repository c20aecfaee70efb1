"""DraftedBlocks: what a draft model has computed of KV blocks. Numbers and hashes, no tensors."""

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
    """Notes for each block: the hash of the tokens that it holds, or its sequence and place there.

    The draft model's pool has the blocks of the model's pool. A block of a cached prefix, of the
    prompt that a fork shares, or of a sequence that was preempted may be computed already: if its
    note is what the sequence would note. Beyond `longest` tokens nothing of one is computed.

    A note of a place says nothing about how many tokens were computed there, which `num_seen` does
    for the blocks that the sequence had last: a block that it had there before has fewer.
    """

    def __init__(self, block_size: int, longest: int) -> None:
        self.longest = longest
        self._block_size = block_size
        self._notes: dict[int, int | tuple[int, int]] = {}
        self._last_tables: WeakKeyDictionary[Sequence, list[int]] = WeakKeyDictionary()

    def complete(self, seq: Sequence, num_seen: int, end: int) -> int:
        """Note that the first `end` tokens are computed; returns how many of them were already.

        `num_seen` were when the sequence last had drafts. Its other blocks are its own.
        """
        size, table = self._block_size, seq.block_table
        last = self._last_tables.get(seq, [])
        self._last_tables[seq] = table
        hashes = block_hashes(seq, end // size, size)[: end // size]
        num_full = num_own = seq.num_passed_blocks[0]
        for index in range(num_own, len(table)):
            note = self._notes.get(table[index])
            if index < len(hashes) and note == hashes[index]:
                num_full += num_full == index
            elif note != (seq.seq_id, index) or last[index : index + 1] != [table[index]]:
                break
            num_own = index + 1
        self.take(seq, num_own)
        for index in range(seq.num_passed_blocks[0], len(hashes)):
            self._notes[table[index]] = hashes[index]
        return max(num_full * size, min(num_seen, num_own * size))

    def take(self, seq: Sequence, start: int) -> None:
        """Note that the blocks of its table from `start` on are the sequence's own."""
        for index in range(start, len(seq.block_table)):
            self._notes[seq.block_table[index]] = seq.seq_id, index
