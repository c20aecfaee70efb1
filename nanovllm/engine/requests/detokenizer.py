"""Incremental detokenization: token ids go in one by one, pieces of text come out.

All pieces together equal the tokenizer's own `decode` of all ids. Each sequence has its own
Detokenizer, which knows nothing about requests, stop strings or streams. The text of an output goes
on behind its prompt: `begin_behind` and `prompt_context` give it the prompt's last tokens.
"""

import codecs
from itertools import islice
from typing import Any

from nanovllm.engine.requests.token_pieces import REPLACEMENT, byte_of, token_pieces

# How many emitted tokens the window keeps. A character has at most four tokens, so these hold all
# of the last one; and the last four bytes of a run that is not UTF-8 are not UTF-8 either.
CONTEXT = 4


class Detokenizer:
    """Emits each character as soon as no later token can change it, at O(1) per token.

    `add` decodes a window of the last tokens, and removes the characters emitted before, by their
    number. The window starts a few tokens early, because a token's text depends on those before it:
    they may hold half a character, and a first token may lose its space. Skipped ids never enter
    the window. `add` emits all of the window's text except what later tokens may change:

    - U+FFFD at the end: perhaps the first bytes of a character. At most three more bytes decide.
    - A run of byte-fallback tokens ("<0x41>"): `decode` turns every byte of the run into U+FFFD if
      the run is not valid UTF-8. So it is emitted when another token ends it, or when a byte makes
      it invalid.
    - With `clean_up_tokenization_spaces`: spaces and quotes at the end, and the n, v, r among and
      after them. `decode` rewrites " .", " ' ", " n't" and similar; no rewrite extends across any
      other character.

    This holds for fast tokenizers with the decoders of language models (byte-level, Metaspace,
    byte fallback, WordPiece, BPE suffix, joined words). For other decoders, see `finish`.

    Nearly all tokens of most tokenizers have the same text behind any whole character: it is looked
    up in the tokenizer's TokenPieces, and the window starts over with this token.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_pieces = token_pieces(tokenizer, skip_special_tokens)
        self._token_ids: list[int] = []
        self._pieces: list[str] = []  # all text emitted so far
        self._finished = False
        self._window: list[int] = []
        self._num_emitted = 0  # characters at the start of the window's text
        self._pending = ""  # the characters after the emitted ones, when last decoded
        self._run = codecs.getincrementaldecoder("utf-8")()  # of trailing byte-fallback tokens
        self._run_is_broken = False
        self._is_in_run = False  # the last shown token is a byte-fallback token

    def begin_behind(self, token_id: int) -> bool:
        """Begin behind a prompt that ends with this token. False if that needs the ones before."""
        if (piece := self._token_pieces[token_id]) is None:
            return False
        self._token_ids, self._window, self._num_emitted = [token_id], [token_id], piece.num_first
        self._pieces = [self._decode(self._window)]
        return True

    def add(self, token_id: int) -> str:
        """Take the next token; return the text that is now final and was not returned before."""
        return self.add_all([token_id])

    def add_all(self, token_ids: list[int]) -> str:
        """Take the next tokens; return the text that is now final, as `add`."""
        if self._finished:
            raise RuntimeError("this Detokenizer is finished: make a new one for each sequence")
        self._token_ids += token_ids
        texts: list[str] = []
        number = 0
        while number < len(token_ids):
            if self._is_at_end:
                number += self._look_up(token_ids, number, texts)
            if number < len(token_ids):
                texts.append(self._add_to_window(token_ids[number]))
                number += 1
        text = "".join(texts)
        self._pieces.append(text)
        return text

    @property
    def _is_at_end(self) -> bool:
        """Whether the last token's text is whole, and all of it is emitted."""
        return bool(self._window) and not self._pending and not self._is_in_run

    def _look_up(self, token_ids: list[int], start: int, texts: list[str]) -> int:
        """Add tokens from `start` on while their texts need no neighbours; returns their number."""
        pieces, piece, end = self._token_pieces, None, start
        for token_id in islice(token_ids, start, None):
            found = pieces[token_id]
            if found is None:
                break
            texts.append(found.text)
            piece, end = found, end + 1
        if piece is not None:
            self._window, self._num_emitted = [token_ids[end - 1]], piece.num_first
        return end - start

    def _add_to_window(self, token_id: int) -> str:
        """Add a token with text that may depend on its neighbours; return new final text.

        Also used for the first token, and for a token after half a character.
        """
        twice = self._decode([token_id, token_id])  # twice: a space alone may decode to "" too
        if not twice:  # a skipped id, or one outside the vocabulary
            return ""
        byte = byte_of(str(self._tokenizer.convert_ids_to_tokens(token_id)), twice)
        self._is_in_run = byte is not None
        if byte is None:
            self._run.reset()
            self._run_is_broken = False
            is_open = self._pending.startswith((" ", "'")) and not twice.strip(" 'nvr")
        elif self._run_is_broken:  # the U+FFFD before it is final, and this is another
            return REPLACEMENT
        else:
            is_open = self._may_continue(byte)
        self._window.append(token_id)
        # An open run is decoded only once, at its end: decoding it at each token is quadratic.
        return "" if is_open else self._advance()

    def finish(self) -> str:
        """Return the rest of the text: `decode` of all ids without the emitted text.

        If an unknown kind of decoder has changed emitted text, there is no exact rest; then the
        rest of the last window is returned. No token may be added afterwards.
        """
        if self._finished:
            return ""
        self._finished = True
        if self._token_pieces.are_known and self._is_at_end:
            return ""
        text, emitted = self._decode(self._token_ids), "".join(self._pieces)
        if text.startswith(emitted):
            return text[len(emitted) :]
        return self._decode(self._window)[self._num_emitted :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return text

    def _may_continue(self, byte: bytes) -> bool:
        """Whether the run of bytes that ends with `byte` may still become valid UTF-8."""
        try:
            self._run.decode(byte)
        except UnicodeDecodeError:
            self._run_is_broken = True
        return not self._run_is_broken

    def _advance(self) -> str:
        """Decode the window, return its new final text, and drop tokens from its start."""
        text = self._decode(self._window)
        end = self._num_final(text)
        piece = text[self._num_emitted : end]
        self._num_emitted, self._pending = end, text[end:]
        if len(self._window) >= 2 * CONTEXT:
            context = self._window[-CONTEXT:]
            text = self._decode(context)
            end = self._num_final(text)
            if text[end:] == self._pending:  # false if more is pending than the context holds
                self._window, self._num_emitted = context, end
        return piece

    def _num_final(self, text: str) -> int:
        """How many characters of the window's text no later token can change."""
        if text.endswith(REPLACEMENT):
            return len(text) - 1
        if not self._token_pieces.cleans_up:
            return len(text)
        end = text[len(text.rstrip(" 'nvr")) :]
        return len(text) - len(end.lstrip("nvr"))  # only a space or a quote starts a rewrite
