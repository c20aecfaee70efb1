"""From token ids to text while they come: one Detokenizer for each request.

It knows nothing about requests, stop strings or streams: ids go in, and out come pieces of text
which together are exactly what the tokenizer's own `decode` makes of all the ids.
"""

import codecs
import re
from typing import Any

REPLACEMENT = "\ufffd"  # decode's text for bytes that are not, or not yet, UTF-8
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")  # what a byte-fallback token is called
# The tokens that a window keeps of what was told. A character is cut into four at most, so these
# hold the last one whole; and the last four bytes of a run that is not UTF-8 are none themselves.
CONTEXT = 4


class Detokenizer:
    """Tells each character as soon as no later token can change it, at O(1) per token.

    `add` decodes a window of the last tokens; what it told before is cut off by its length. The
    window starts a few tokens early, for a token's text depends on those before it: on half a
    character, on a space that only a first token loses. Skipped ids never enter it. `add` tells all
    of the window's text but what these may still change:

    - U+FFFD at the end: perhaps the first bytes of a character. Three more bytes decide.
    - A run of byte-fallback tokens ("<0x41>"): `decode` makes every byte of the run U+FFFD if the
      run is not valid UTF-8, so it is told when another token ends it, or a byte breaks it.
    - With `clean_up_tokenization_spaces`, spaces and quotes at the end and the n, v, r among and
      after them: `decode` rewrites " .", " ' ", " n't" and the like, and no rewriting reaches
      across any other character.

    This holds for fast tokenizers with the decoders of language models (byte-level, Metaspace,
    byte fallback, WordPiece, BPE suffix, joined words). For a decoder that rewrites more than
    that, see `finish`.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._cleans_up = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._token_ids: list[int] = []
        self._pieces: list[str] = []  # what was told
        self._finished = False
        self._window: list[int] = []
        self._num_told = 0  # characters of the window's text
        self._pending = ""  # its characters after those, when it was last decoded
        self._run = codecs.getincrementaldecoder("utf-8")()  # of byte-fallback tokens
        self._run_is_broken = False

    def add(self, token_id: int) -> str:
        """Take the next token; return the text that is now certain and was not told yet."""
        if self._finished:
            raise RuntimeError("this Detokenizer is finished: make a new one for each request")
        self._token_ids.append(token_id)
        twice = self._decode([token_id, token_id])  # once, a first space would decode to "", too
        if not twice:  # skipped, or in no vocabulary
            return ""
        byte = self._byte_of(token_id, twice)
        if byte is None:
            self._run.reset()
            self._run_is_broken = False
            is_open = self._pending.startswith((" ", "'")) and not twice.strip(" 'nvr")
        elif self._run_is_broken:  # the U+FFFD before it is certain now, and this is the next
            return self._tell(REPLACEMENT)
        else:
            is_open = self._may_go_on(byte)
        self._window.append(token_id)
        # An open run is decoded once, at its end: at each of its tokens would be quadratic.
        return "" if is_open else self._tell(self._advance())

    def finish(self) -> str:
        """Return what is left of `decode` of all ids; afterwards nothing more comes.

        Only where an unknown kind of decoder has changed text that was told is there no such rest:
        told is told, and the last resort is what the last window has left.
        """
        if self._finished:
            return ""
        self._finished = True
        text, told = self._decode(self._token_ids), "".join(self._pieces)
        if text.startswith(told):
            return text[len(told) :]
        return self._decode(self._window)[self._num_told :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return text

    def _tell(self, piece: str) -> str:
        self._pieces.append(piece)
        return piece

    def _byte_of(self, token_id: int, twice: str) -> bytes | None:
        """The byte that a byte-fallback token stands for, if it is one and is decoded as one."""
        if len(twice) > 2:  # any other token, even if its text is "<0x41>"
            return None
        match = BYTE_TOKEN.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token_id)))
        return bytes.fromhex(match[1]) if match else None

    def _may_go_on(self, byte: bytes) -> bool:
        """Whether the run of bytes that ends with `byte` may still become valid UTF-8."""
        try:
            self._run.decode(byte)
        except UnicodeDecodeError:
            self._run_is_broken = True
        return not self._run_is_broken

    def _advance(self) -> str:
        """Decode the window; return what is new and certain, and forget what is far behind."""
        text = self._decode(self._window)
        end = self._num_certain(text)
        piece = text[self._num_told : end]
        self._num_told, self._pending = end, text[end:]
        if len(self._window) >= 2 * CONTEXT:
            context = self._window[-CONTEXT:]
            text = self._decode(context)
            end = self._num_certain(text)
            if text[end:] == self._pending:  # not if more is pending than the context has
                self._window, self._num_told = context, end
        return piece

    def _num_certain(self, text: str) -> int:
        """How many characters of a window's text are certain, whatever comes."""
        if text.endswith(REPLACEMENT):
            return len(text) - 1
        if not self._cleans_up:
            return len(text)
        end = text[len(text.rstrip(" 'nvr")) :]
        return len(text) - len(end.lstrip("nvr"))  # only a space or a quote begins a rewriting
