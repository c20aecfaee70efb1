"""Forecast: whether a sequence that joins gets somewhere before the KV pool is full.

Running sequences grow and end. How long those get that only their length ends is known; of the
others it is guessed from those that have ended. It knows lengths and numbers of blocks alone.
"""

import bisect
from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

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
    several sequences hold is taken to be free when the first of them ends: that is too soon.
    """

    def __init__(
        self, lengths: Lengths, running: Iterable[Sequence], num_free: int, block_size: int
    ) -> None:
        self.lengths = lengths
        self.block_size = block_size
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
            self.room += len(seq.block_table) or -(-num_tokens // self.block_size)
            self.wanted += (num_tokens + steps - 2) // self.block_size + 1
            # What begins has its first token before the next decode step.
            ahead = seq.num_cached_tokens < num_tokens - 1
            self.num_tokens.append(num_tokens + ahead)
            self.steps.append(steps - ahead)

    def _steps_until_full(self) -> float:
        """How many steps the pool is good for; infinity if for all."""
        num_tokens, steps = np.array(self.num_tokens), np.array(self.steps)
        ends = np.unique(steps)  # most is wanted right before some end
        wanted = self._blocks(num_tokens + ends[:, None]) * (steps >= ends[:, None])
        full = wanted.sum(axis=1) > self.room
        if not full.any():
            return np.inf
        index = int(full.argmax())
        start, end = (int(ends[index - 1]) if index else 0), int(ends[index])
        alive = num_tokens[steps > start]
        while end - start > 1:  # more and more is wanted there
            middle = (start + end) // 2
            is_full = self._blocks(alive + middle).sum() > self.room
            start, end = (start, middle) if is_full else (middle, end)
        return start

    def _blocks(self, num_tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Blocks held in the step that yields a token of that number, which is not computed yet."""
        return (num_tokens - 2) // self.block_size + 1
