"""Opening: where in a message the prompt ends, and the answer begins."""

from typing import Any, NamedTuple

from nanovllm.chat.harmony.header import Header
from nanovllm.chat.harmony.marked_text import (
    CHANNEL,
    CONSTRAIN,
    ENDS,
    MESSAGE,
    START,
    MarkedText,
    Piece,
)

AUTHOR = Piece("assistant")


class Opening(NamedTuple):
    """The end of the prompt, after the last `<|start|>`: usually `assistant`."""

    pieces: tuple[Piece, ...] = (AUTHOR,)

    @property
    def place(self) -> str:
        """What the answer begins with.

        "header": the header of a message, after its author. "final": the body of a message of the
        final channel. "other": that of another channel. "start": a new message. "": something else.
        """
        marks = [text for text, is_marker in self.pieces if is_marker]
        if self.pieces and self.pieces[-1].is_marker and self.pieces[-1].text in ENDS:
            return "start"
        if MESSAGE in marks and not set(marks).intersection(ENDS):
            return "final" if self._header.channel == "final" else "other"
        return "header" if self.pieces == (AUTHOR,) else ""

    @property
    def _header(self) -> Header:
        header = Header()
        for text, is_marker in self.pieces:
            if is_marker and text == MESSAGE:
                break
            if is_marker and text in (CHANNEL, CONSTRAIN):
                header.add_mark(text)
            elif not is_marker:
                header.add_text(text)
        return header


def opening_of(tokenizer: Any, special: dict[int, str], prompt_token_ids: list[int]) -> Opening:
    """The opening of the answer to a prompt; of one without a `<|start|>`, the usual one."""
    begin = next(
        (i for i in range(len(prompt_token_ids), 0, -1)
         if special.get(prompt_token_ids[i - 1]) == START), None,
    )  # fmt: skip
    if begin is None:
        return Opening()
    ids = prompt_token_ids[begin:]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return Opening(tuple(MarkedText(tokenizer, special).feed(text, ids, ended=True)))
