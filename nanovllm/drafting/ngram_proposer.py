"""N-grams: the tokens that followed an earlier occurrence of a sequence's last tokens."""

from array import array
from weakref import WeakKeyDictionary

from nanovllm.engine.schedule.sequence import Sequence

ITEM = array("i").itemsize
MOST_ROUNDS = 16  # the most rounds of a search that finds bytes in the middle of tokens


class NgramText:
    """A sequence's tokens as bytes, to find n-grams in them fast.

    The last token is left out: nothing follows it yet. A search takes a microsecond or two for each
    n, and 20 to 70 if 32,000 tokens do not have the n-gram.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self.reset()

    def update(self, seq: Sequence) -> None:
        """Add the tokens that are now followed by a known token."""
        last = seq.num_known_tokens - 1
        if last < len(self._text) // ITEM:  # a token was taken back
            self.reset()
        self._text += array("i", seq.token_ids[len(self._text) // ITEM : last]).tobytes()

    def reset(self) -> None:
        """Start over: the next `update` adds everything again."""
        self._text = bytearray()

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """The tokens after the latest earlier occurrence of the longest n-gram that ends the
        sequence.

        If they reach the sequence's end, the drafts repeat themselves: a text with a period shorter
        than `most` is guessed to continue with this period.
        """
        self.update(seq)
        token_ids = seq.token_ids
        end_of_text = array("i", token_ids[-self._lengths[0] :]).tobytes()
        for n in self._lengths:
            if n < len(token_ids) and (end := self._find(end_of_text[-n * ITEM :])):
                period = len(token_ids) - end
                return [token_ids[end + index % period] for index in range(most)]
        return []

    def _find(self, ngram: bytes) -> int:
        """The index after the n-gram's last occurrence, 0 if there is none."""
        found = self._text.rfind(ngram)
        for _ in range(MOST_ROUNDS):
            if found < 0:
                break
            if found % ITEM == 0:
                return (found + len(ngram)) // ITEM
            found = self._text.rfind(ngram, 0, found + len(ngram) - 1)
        return 0  # only in the middle of tokens


class NgramProposer:
    """A proposer that searches for n-grams in each sequence's own tokens."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self.reset()

    def propose(self, seqs: list[Sequence], most: list[int]) -> list[list[int]]:
        """Drafts from each sequence's own tokens."""
        return [self._text(seq).propose(seq, n) for seq, n in zip(seqs, most, strict=True)]

    def reset(self) -> None:
        """Drop all texts; they are made again from the sequences' tokens."""
        self._texts: WeakKeyDictionary[Sequence, NgramText] = WeakKeyDictionary()

    def _text(self, seq: Sequence) -> NgramText:
        text = self._texts.get(seq)
        if text is None:
            text = self._texts[seq] = NgramText(self._shortest, self._longest)
        return text
