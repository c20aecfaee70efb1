"""Forecast: whether a sequence that is admitted now gets far enough before the KV pool is full.

Running sequences grow, and free their blocks when they end. The end is known for a sequence that
only its length can end, and estimated from past sequences for the others. This file knows only
lengths and numbers of blocks. `growth` finds the step at which the pool is full.
"""

import bisect
from collections import Counter, deque
from collections.abc import Iterable
from itertools import accumulate

from nanovllm.engine.cache.block_manager import FreeBlocks
from nanovllm.engine.schedule.sequence import Sequence

# The least steps before a preemption, for each token that would be computed again after it, by
# whether the end is known or estimated. benchmarks/scheduler.py compares other values.
WORTHWHILE = {True: 0.3, False: 0.05}
MIN_ENDED = 16  # with fewer, sequences are assumed to end at once
MAX_ENDED = 1024  # the latest ones count


class Lengths:
    """How long sequences get, learned from those that ended."""

    def __init__(self) -> None:
        self._ended: deque[int] = deque(maxlen=MAX_ENDED)  # output lengths
        self._sorted: list[int] = []  # the same, sorted; empty when it is out of date
        self._sums: list[int] = []  # at each index, of the sorted lengths from there on

    def learn(self, seq: Sequence) -> None:
        """Record the length of a finished sequence."""
        if not seq.ends_by_length:
            self._ended.append(seq.num_tokens - seq.num_prompt_tokens)
            self._sorted = []

    def steps_left(self, seq: Sequence) -> int:
        """How many more tokens `seq` gets: known, or the mean of past sequences that got as far.

        A sequence longer than all recorded ones is expected to grow by half its length.
        """
        most = seq.max_num_tokens - seq.num_tokens + (not seq.generates)  # at least one step
        if seq.ends_by_length:
            return most
        if len(self._ended) < MIN_ENDED:
            return min(1, most)
        if not self._sorted:
            self._sorted = sorted(self._ended)
            self._sums = [*accumulate(reversed(self._sorted))][::-1]
        num_output = seq.num_tokens - seq.num_prompt_tokens
        first = bisect.bisect_right(self._sorted, num_output)
        num_longer = len(self._sorted) - first
        left = self._sums[first] // num_longer - num_output if num_longer else num_output // 2
        return min(max(1, left), most)


class Forecast:
    """Finds the first future step at which the running sequences need more blocks than exist.

    A sequence is admitted if there is no such step, or if this step is so late that computing the
    sequence's tokens again costs less than an empty place in all steps until then. A block that
    several sequences share counts as free when the first of them ends, which is too early. A prompt
    chunk's extra blocks in groups with a window are ignored.
    """

    def __init__(self, lengths: Lengths, running: Iterable[Sequence], free: FreeBlocks) -> None:
        self.lengths = lengths
        self.block_size = free.block_size
        self.limits = [*Counter(free.most_held).items()]  # and the numbers of groups with them
        self.room = free.number  # plus the blocks that the sequences hold
        self.wanted = 0  # blocks needed if all sequences ended at the same time
        self.num_tokens: list[int] = []
        self.steps: list[int] = []
        for seq in running:
            self._add(seq)

    def admits(self, seq: Sequence, num_taken: int) -> bool:
        """Whether `seq`, which takes `num_taken` free blocks, may join; if so, it is counted.

        The first sequence may always join.
        """
        is_first = not self.num_tokens
        before = self.room, self.wanted, len(self.steps)
        self._add(seq)
        self.room -= num_taken
        if is_first or self.wanted <= self.room:
            return True
        from nanovllm.engine.schedule.growth import steps_until_full

        steps = steps_until_full(
            self.room, self.block_size, self.limits, self.num_tokens, self.steps
        )
        if steps >= WORTHWHILE[seq.ends_by_length] * seq.num_tokens:
            return True
        self.room, self.wanted, length = before
        del self.steps[length:], self.num_tokens[length:]
        return False

    def _add(self, seq: Sequence) -> None:
        num_tokens, steps = seq.num_tokens, self.lengths.steps_left(seq)
        for _ in range(seq.num_places if seq.siblings else 1):
            num_held = sum(map(len, seq.block_tables)) - sum(seq.num_passed_blocks)
            self.room += num_held or self._blocks(num_tokens)
            self.wanted += self._blocks(num_tokens + steps - 1)
            # A new sequence samples its first token before the next decode step.
            ahead = seq.num_cached_tokens < num_tokens - 1
            self.num_tokens.append(num_tokens + ahead)
            self.steps.append(steps - ahead)

    def _blocks(self, num_tokens: int) -> int:
        """The blocks that a sequence with `num_tokens` computed tokens holds."""
        num_blocks = -(-num_tokens // self.block_size)
        return sum(min(num_blocks, most) * groups for most, groups in self.limits)
