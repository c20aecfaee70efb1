"""N-grams: what came after a sequence's last tokens when they occurred before, in its own text."""

from weakref import WeakKeyDictionary

from nanovllm.engine.sequence import Sequence


class NgramIndex:
    """A follower that knows where each of a sequence's n-grams ended last.

    For n from `shortest` to `longest`. N-grams that end with the last token have no token after
    them yet, and are left out. A token costs O(longest), once.
    """

    _last: int  # n-grams that end before this token are entered

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self.reset()

    def update(self, seq: Sequence) -> None:
        """Enter the n-grams that a known token now follows."""
        last = seq.num_known_tokens - 1
        if last < self._last:  # a token was taken back
            self.reset()
        token_ids = seq.token_ids
        for end in range(self._last + 1, last + 1):
            for n in self._lengths:
                if n <= end:
                    self._ends[tuple(token_ids[end - n : end])] = end
        self._last = last

    def reset(self) -> None:
        """Start over: the next `update` enters everything again."""
        self._last = 0
        self._ends: dict[tuple[int, ...], int] = {}  # the index after the n-gram

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """The tokens after the longest n-gram that ends the sequence and occurred before.

        Of equal ones the latest counts. Where the sequence's tokens end, the drafts repeat
        themselves: a text with a period shorter than `most` is guessed to go on with it.
        """
        self.update(seq)
        token_ids = seq.token_ids
        for n in self._lengths:
            end = self._ends.get(tuple(token_ids[-n:])) if n <= len(token_ids) else None
            if end is not None:
                period = len(token_ids) - end
                return [token_ids[end + index % period] for index in range(most)]
        return []


class NgramProposer:
    """A proposer with an index for each sequence. It knows no other text than the sequence's."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self.reset()

    def propose(self, seqs: list[Sequence], most: list[int]) -> list[list[int]]:
        """Drafts from each sequence's own tokens."""
        return [self._index(seq).propose(seq, n) for seq, n in zip(seqs, most, strict=True)]

    def reset(self) -> None:
        """Drop all indices; they are made again from the sequences' tokens."""
        self._indices: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def _index(self, seq: Sequence) -> NgramIndex:
        index = self._indices.get(seq)
        if index is None:
            index = self._indices[seq] = NgramIndex(self._shortest, self._longest)
        return index
