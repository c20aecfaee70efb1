"""MarkedText: an answer's text, divided at its special tokens."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
ENDS = (END, RETURN, CALL)
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)


class Piece(NamedTuple):
    """Some text, or the text of one special token."""

    text: str
    is_marker: bool = False


class MarkedText:
    """Takes an answer's text and tokens as they come, and divides the text at special tokens.

    Each token must come before its text, or with it. The place of a special token in the text is
    found by decoding the tokens before it, so text that only looks like a marker stays text.
    `special` has the texts of special tokens by their ids.
    """

    def __init__(self, tokenizer: Any, special: Mapping[int, str]) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._ids: list[int] = []  # since the last special token, which is the first of them
        self._num_known = 0  # characters up to the end of the last special token
        self._places: deque[tuple[int, str]] = deque()  # of special tokens that are still to come
        self._text = ""  # that waits, from `_begin` on
        self._begin = self._at = 0  # `_at` is its place in the whole text

    def feed(self, text: str, token_ids: Iterable[int], ended: bool = False) -> Iterator[Piece]:
        """The pieces of new text; `ended`: no more comes.

        A special token at the very end of the text is reported although its text was left out,
        as that of a token that ends the output is.
        """
        self._locate(token_ids)
        self._text, self._begin = self._text[self._begin :] + text, 0
        while self._places:
            place, marker = self._places[0]
            yield from self._take(place - self._at)
            if self._at < place or not (ended or self._num_waiting >= len(marker)):
                return
            self._places.popleft()
            yield Piece(marker, is_marker=True)
            if marker.startswith(self._text[self._begin : self._begin + len(marker)]):
                self._skip(min(len(marker), self._num_waiting))
        yield from self._take(self._num_waiting)

    @property
    def _num_waiting(self) -> int:
        return len(self._text) - self._begin

    def _skip(self, length: int) -> None:
        self._begin, self._at = self._begin + length, self._at + length

    def _take(self, length: int) -> Iterator[Piece]:
        """At most the first `length` characters of the text that waits."""
        taken = self._text[self._begin : self._begin + length]
        self._skip(len(taken))
        if taken:
            yield Piece(taken)

    def _locate(self, token_ids: Iterable[int]) -> None:
        """Find the places of the special tokens among new tokens."""
        for token_id in token_ids:
            self._ids.append(token_id)
            if (marker := self._special.get(token_id)) is None:
                continue
            start = self._num_known
            self._num_known += len(self._decode(self._ids))
            if start:  # the first token was counted before
                self._num_known -= len(self._decode(self._ids[:1]))
            self._places.append((self._num_known - len(marker), marker))
            self._ids = [token_id]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The special tokens of a tokenizer, and the markers; a ValueError if a marker is no token."""
    added = {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()}
    missing = [marker for marker in MARKERS if marker not in added.values()]
    if missing:
        raise ValueError(
            f"the tokenizer has no token {missing[0]!r}, which the format harmony needs; set"
            " tool_parser and reasoning_parser to 'none' to get the text as it is"
        )
    decoder = tokenizer.added_tokens_decoder
    return {i: text for i, text in added.items() if decoder[i].special or text in MARKERS}
