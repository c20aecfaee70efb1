"""Source: text that comes in pieces, and the place up to which it has been read.

Readers are generators. They move the place forward, yield None if they need more text, and return
whether they found what they search for. So they do not depend on how the text is divided.
"""

import re
from collections.abc import Generator

Steps = Generator[None, None, bool]
SPACE = re.compile(r"[ \t\r\n]*")


class Source:
    """The text after the place `at` was not read yet. If it has `ended`, no more text comes."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def add(self, piece: str) -> None:
        """Append a piece of text."""
        # If nothing else refers to it, CPython extends the text in place: no copy for each piece.
        # So readers must not keep match objects, which refer to it, while they wait.
        text, self.text = self.text, ""
        text += piece
        self.text = text

    def drop_read(self) -> None:
        """Drop the text before `at`; readers never go back."""
        self.text, self.at = self.text[self.at :], 0

    def has_more(self) -> Steps:
        """Wait for a character; False at the end."""
        while self.at == len(self.text):
            if self.ended:
                return False
            yield
        return True

    def skip_space(self) -> Generator[None, None, None]:
        """Skip white space."""
        while (yield from self.has_more()) and self.run(SPACE):
            pass

    def skip(self, literal: str) -> Steps:
        """Skip `literal`, or stay if it is not there."""
        while not self.text.startswith(literal, self.at):
            if self.ended or not self._may_begin(literal):
                return False
            yield
        self.at += len(literal)
        return True

    def skip_last(self, literal: str) -> Steps:
        """Skip `literal`, which the end of the text may cut off; or stay if it is not there."""
        if (yield from self.skip(literal)):
            return True
        if not (self.ended and self._may_begin(literal)):
            return False
        self.at = len(self.text)
        return True

    def skip_comma(self) -> Steps:
        """Skip white space and a comma in it; returns whether there was a comma."""
        yield from self.skip_space()
        found = yield from self.skip(",")
        yield from self.skip_space()
        return found

    def skip_all(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Skip and return all text that `pattern`, a repeated set of characters, matches."""
        begin = self.at
        while (yield from self.has_more()) and self.run(pattern):
            pass
        return self.text[begin : self.at]

    def find(self, marker: str) -> int:
        """The place of the next `marker`, or the end of the text that cannot belong to a marker.

        The text after that end may be the first part of a marker.
        """
        place = self.text.find(marker, self.at)
        if place >= 0:
            return place
        end = len(self.text)
        tail = self.text[max(self.at, end - len(marker) + 1) :]
        return end if self.ended else end - overlap(tail, marker)

    def _may_begin(self, literal: str) -> bool:
        """Whether all the remaining text is the beginning of `literal`."""
        return literal.startswith(self.text[self.at : self.at + len(literal)])

    def run(self, pattern: re.Pattern[str]) -> str:
        """Skip and return what `pattern` matches in the text so far; it may match nothing."""
        match = pattern.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        return match[0]


def overlap(text: str, marker: str) -> int:
    """How many characters at the end of `text` may begin the marker."""
    lengths = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(marker[:length])), 0)
