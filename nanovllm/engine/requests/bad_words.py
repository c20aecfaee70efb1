"""BadWords: the words that a request forbids, prepared so that a step looks up few of them."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class TokenSet(NamedTuple):
    """Token ids as a set, and as an array."""

    ids: frozenset[int]
    array: npt.NDArray[np.int64]


def token_set(ids: Iterable[int]) -> TokenSet:
    """Make both forms."""
    kept = frozenset(ids)
    return TokenSet(kept, np.fromiter(kept, np.int64, len(kept)))


class BadWords:
    """Words as token ids. The last token of a word is forbidden after the tokens before it.

    `_starts` are the distinct tokens before the last ones, each reversed, in sorted order. So all
    of them that end an output are the beginnings of one of them: the last that is not greater than
    the reversed output. `_shorter` has, for each start, the place of the longest other start that
    begins it. A step takes one binary search, and a look at each start that ends the output.
    """

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        lasts = defaultdict[tuple[int, ...], set[int]](set)
        for word in words:
            lasts[word[-2::-1]].add(word[-1])
        self._starts = sorted(lasts)
        self._lasts = [token_set(lasts[start]) for start in self._starts]
        self.longest = max(map(len, self._starts))  # of the tokens before a last one
        self._shorter: list[int] = []  # -1: there is none
        place = -1
        for number, start in enumerate(self._starts):
            while place >= 0 and start[: len(self._starts[place])] != self._starts[place]:
                place = self._shorter[place]
            self._shorter.append(place)
            place = number

    @property
    def alone(self) -> frozenset[int]:
        """The words of one token, which are always forbidden."""
        return self._lasts[0].ids if not self._starts[0] else frozenset()

    def after(self, output: list[int]) -> list[TokenSet]:
        """The tokens that are forbidden after the last `longest` tokens of an output."""
        found, end = list[TokenSet](), tuple(reversed(output))
        place = bisect_right(self._starts, end) - 1
        while place >= 0:
            start = self._starts[place]
            if found or end[: len(start)] == start:  # what begins a start that fits, fits too
                found.append(self._lasts[place])
            place = self._shorter[place]
        return found
