"""Source: text that comes in pieces, and the place up to which it has been read.

Readers are generators. They move the place forward, yield None where they need more text, and
return whether they found what they look for. So they do not depend on how the text is cut.
"""

import re
from collections.abc import Generator

Steps = Generator[None, None, bool]
SPACE = re.compile(r"[ \t\r\n]*")


class Source:
    """`text` from `at` on has not been read. If it has `ended`, no more comes."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def drop_read(self) -> None:
        """Drop the text before `at`, to which no reader goes back."""
        self.text, self.at = self.text[self.at :], 0

    def has_more(self) -> Steps:
        """Wait for a character; False at the end."""
        while self.at == len(self.text):
            if self.ended:
                return False
            yield
        return True

    def skip_space(self) -> Generator[None, None, None]:
        """Pass over white space."""
        while (yield from self.has_more()) and self._skip(SPACE):
            pass

    def skip(self, literal: str) -> Steps:
        """Pass over `literal`, or stay."""
        while not self.text.startswith(literal, self.at):
            if self.ended or not literal.startswith(self.text[self.at :]):
                return False
            yield
        self.at += len(literal)
        return True

    def skip_all(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Pass over all that `pattern`, a repeated set of characters, matches; return it."""
        begin = self.at
        while (yield from self.has_more()) and self._skip(pattern):
            pass
        return self.text[begin : self.at]

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        """Pass over a match; whether it has characters."""
        match = pattern.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        return match.end() > match.start()


def overlap(text: str, marker: str) -> int:
    """How many characters at the end of `text` may begin the marker."""
    lengths = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(marker[:length])), 0)
