"""Forecast: whether a sequence that joins gets somewhere before the KV pool is full.

Running sequences grow and end. How long those get that only their length ends is known; of the
others it is guessed from those that have ended. It knows lengths and numbers of blocks alone.
"""

import bisect
import math
import sys
from collections import deque
from collections.abc import Iterable
from itertools import accumulate

from nanovllm.engine.sequence import Sequence

# Steps ahead for each token that would be computed again, by whether they are known or guessed:
# benchmarks/scheduler.py says what comes of other numbers.
WORTHWHILE = {True: 0.3, False: 0.05}
MIN_ENDED = 16  # fewer say nothing: sequences are taken to end at once
MAX_ENDED = 1024  # the latest count


class Lengths:
    """How long sequences get."""

    def __init__(self) -> None:
        self._ended: deque[int] = deque(maxlen=MAX_ENDED)  # output lengths
        self._sorted: list[int] = []  # the same, empty if it has to be made anew
        self._sums: list[int] = []  # of the lengths from each on

    def learn(self, seq: Sequence) -> None:
        """Take note of a sequence that has finished."""
        if not seq.ends_by_length:
            self._ended.append(seq.num_tokens - seq.num_prompt_tokens)
            self._sorted = []

    def steps_left(self, seq: Sequence) -> int:
        """How many tokens are still to come: as is known, or the mean of those that got as far.

        One that has outlived all others gets half as long again.
        """
        most = seq.max_num_tokens - seq.num_tokens
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
    """Looks ahead to the first moment when the running sequences want more blocks than there are.

    A sequence may join if that moment never comes, or comes so late that to compute its tokens
    again costs less than to wait, which costs a row of all the steps until then. A block that
    several sequences hold is taken to be free when the first of them ends: that is too soon. With
    windows a sequence grows to `most_blocks`; what a chunk of a prompt takes beside is left out.
    """

    def __init__(
        self,
        lengths: Lengths,
        running: Iterable[Sequence],
        num_free: int,
        block_size: int,
        most_blocks: int = sys.maxsize,
    ) -> None:
        self.lengths = lengths
        self.block_size = block_size
        self.most_blocks = most_blocks
        self.room = num_free  # and what the sequences hold
        self.wanted = 0  # blocks in the end, if none ended before the others
        self.num_tokens: list[int] = []
        self.steps: list[int] = []
        for seq in running:
            self._add(seq)

    def admits(self, seq: Sequence, num_taken: int) -> bool:
        """Whether `seq` may join, which takes so many free blocks; if so it is counted from now.

        The first one always may.
        """
        is_first = not self.num_tokens
        before = self.room, self.wanted, len(self.steps)
        self._add(seq)
        self.room -= num_taken
        if is_first or self.wanted <= self.room:
            return True
        if self._steps_until_full() >= WORTHWHILE[seq.ends_by_length] * seq.num_tokens:
            return True
        self.room, self.wanted, length = before
        del self.steps[length:], self.num_tokens[length:]
        return False

    def _add(self, seq: Sequence) -> None:
        num_tokens, steps = seq.num_tokens, self.lengths.steps_left(seq)
        for _ in (seq, *seq.followers):
            num_held = len(seq.block_table) - seq.num_passed_blocks
            self.room += num_held or self._blocks(num_tokens)
            self.wanted += self._blocks(num_tokens + steps - 1)
            # What begins has its first token before the next decode step.
            ahead = seq.num_cached_tokens < num_tokens - 1
            self.num_tokens.append(num_tokens + ahead)
            self.steps.append(steps - ahead)

    def _blocks(self, num_tokens: int) -> int:
        """What a sequence holds that has computed so many."""
        return min(-(-num_tokens // self.block_size), self.most_blocks)

    def _steps_until_full(self) -> float:
        """How many steps the pool is good for; infinity if for all."""
        room, most = self.room, self.most_blocks
        lengths: list[int] = []  # of those that grow
        # When a sequence grows no longer, its length now, and how much room that makes.
        events: list[tuple[int, int | None, int]] = []
        for end, num_tokens in zip(self.steps, self.num_tokens, strict=True):
            grown = (most - 1) * self.block_size + 2 - num_tokens
            if grown <= 0:
                room -= most
                events.append((end, None, most))
                continue
            lengths.append(num_tokens)
            if grown < end:
                events += [(grown, num_tokens, -most), (end, None, most)]
            else:
                events.append((end, num_tokens, 0))
        growing = Growth(lengths, self.block_size)
        start = 0
        for end, length, more in sorted(events, key=lambda event: event[0]):
            if growing.blocks(end) > room:  # most is wanted right before some end
                while end - start > 1:  # more and more is wanted there
                    middle = (start + end) // 2
                    is_full = growing.blocks(middle) > room
                    start, end = (start, middle) if is_full else (middle, end)
                return start
            if length is not None:
                growing.remove(length)
            room += more
            start = end
        return math.inf


class Growth:
    """Sequences that grow by a token in each step, and the blocks that they hold together then.

    Counted at once: those in their last block's second half, say, enter a new one half a block on.
    """

    def __init__(self, lengths: list[int], block_size: int) -> None:
        self.block_size = block_size
        # A step yields a token and computes the one before: it holds (length + step - 1) tokens.
        self._filled = sorted((length + block_size - 2) % block_size for length in lengths)
        self._full = sum((length + block_size - 2) // block_size for length in lengths)

    def remove(self, length: int) -> None:
        """Leave out one that had this length at the beginning."""
        full, filled = divmod(length + self.block_size - 2, self.block_size)
        del self._filled[bisect.bisect_left(self._filled, filled)]
        self._full -= full

    def blocks(self, step: int) -> int:
        """What they hold in that step."""
        full, more = divmod(step, self.block_size)
        num_new = len(self._filled) - bisect.bisect_left(self._filled, self.block_size - more)
        return self._full + len(self._filled) * full + num_new
