"""Header: what stands before the body of a message of harmony."""

import re

from nanovllm.chat.harmony.marked_text import CHANNEL, CONSTRAIN

CHANNELS = ("analysis", "commentary", "final")
RECIPIENT = re.compile(r"to=(\S+)")
AUTHOR = re.compile(r"\s*([^\s=]+)(?:\s|$)")
NO_AUTHOR = re.compile(r"\s*(?:t|to|to=\S*)?\s*")
READERS = ("assistant", "user", "all")  # recipients that are no tools
MOST_CHARS = 256  # of each of the two parts of a header
MOST_KEPT = 1024  # of what the model wrote, the last ones: it may repeat marks


class Header:
    """The text from `<|start|>` to `<|message|>`, as it comes: two parts around the channel's mark.

    If it `follows_author`, the prompt has written the author, and only a recipient may come before
    the channel. A later channel replaces an earlier one.
    """

    def __init__(self, follows_author: bool = False) -> None:
        self._follows_author = follows_author
        self._before = ""  # the channel's mark
        self._after: str | None = None
        self._replaced = ""  # text after the marks of earlier channels
        self.written = ""  # all of it, with its marks

    def add_text(self, text: str) -> str:
        """Add text; returns the part of it that a header has no room for."""
        part = self._before if self._after is None else self._after
        kept = text[: max(0, MOST_CHARS + 1 - len(part))]
        self.written += kept
        if self._after is None:
            self._before += kept
        else:
            self._after += kept
        return text[len(kept) :]

    def add_mark(self, mark: str) -> None:
        """Add the mark of a channel, or of the type of the body."""
        self.written = (self.written + mark)[-MOST_KEPT:]
        if mark == CHANNEL:
            self._replaced = f"{self._replaced} {self._after or ''}"[-MOST_KEPT:]
            self._after = ""
        elif mark == CONSTRAIN and self._after is not None and not self._after.endswith(" "):
            self._after += " "

    @property
    def is_text(self) -> bool:
        """Whether this is certainly no header, but text that has none."""
        if self._after is not None:
            return len(self._after) > MOST_CHARS
        if self._follows_author:
            return NO_AUTHOR.fullmatch(self._before) is None or len(self._before) > MOST_CHARS
        return len(self._before) > MOST_CHARS

    @property
    def channel(self) -> str:
        """The channel; "" if there is no known one."""
        text = (self._after or "").lstrip()
        return next((name for name in CHANNELS if text.startswith(name)), "")

    @property
    def is_hidden(self) -> bool:
        """Whether the body is not for the user: analysis, or another author's message."""
        return self.channel == "analysis" or self._author != "assistant"

    @property
    def called(self) -> str:
        """The tool that the message is for, without the namespace of functions; "" if none."""
        found = RECIPIENT.search(f"{self._before} {self._replaced} {self._after or ''}")
        if found is None or found[1] in READERS or self._author != "assistant":
            return ""
        return found[1].removeprefix("functions.")

    @property
    def call(self) -> str:
        """The header of a call, as it is written after its author."""
        return self.written.strip().removeprefix("assistant").lstrip()

    @property
    def body(self) -> str:
        """The text that would be lost if no `<|message|>` came: more words than a header has."""
        if self._after is None:
            words = RECIPIENT.sub("", self._before).split()
            return self._before if self.is_text or len(words) > 1 else ""
        rest = self._after.lstrip()[len(self.channel) :].lstrip()
        return rest if self.is_text or len(RECIPIENT.sub("", rest).split()) > 1 else ""

    @property
    def _author(self) -> str:
        found = None if self._follows_author else AUTHOR.match(self._before)
        return "assistant" if found is None else found[1]
