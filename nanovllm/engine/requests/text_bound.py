"""A lower bound for the number of tokens of a long text, to refuse it before it is tokenized.

Tokenizing takes more than 100 bytes of memory for each byte of text, and counting bytes takes none.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from nanovllm.engine.requests.byte_level import BYTE_OF
from nanovllm.engine.requests.prompt_length import PromptTooLongError

PIECE = 1 << 15  # characters that are counted at a time, so that other threads run in between
NEAR = 1 << 8  # characters before the end of a piece among which its end is sought
BLANK = "\u2581"  # how Metaspace writes a space
BYTE_NAMES = {f"<0x{byte:02X}>": byte for byte in range(256)}
# Steps before the model that remove nothing; some do with the behavior "Removed".
KEEPING = ("NFC", "Prepend", "ByteLevel", "Metaspace", "Split", "Digits", "Punctuation")


def check_long_text(tokenizer: Any, text: str, most: int, why: str) -> None:
    """Raise if a text certainly has more than `most` tokens. `why` explains this limit."""
    bound = text_bound(tokenizer)
    if bound is not None and bound.is_exceeded(text, most):
        raise PromptTooLongError(
            f"prompt must have 1 to {most} tokens ({why}), got more: {len(text)} characters"
        )


class TextBound:
    """The length of the longest token with each byte: a text of n such bytes has n / length tokens.

    Tokens are counted as shares: a byte is at most 1 / length of the token that it is part of, so
    the sum of the shares of a text's bytes is at most the number of its tokens. `longest` has the
    lengths. A text becomes UTF-8 with spaces written as Metaspace does if it `has_blanks`. Without
    `counts_spaces` white space has no share, since an added token takes any number of them. If it
    `composes`, only parts of a text that NFC leaves as they are have a share.
    """

    def __init__(
        self, tokens: Iterable[bytes], *, has_blanks: bool, counts_spaces: bool, composes: bool
    ) -> None:
        self.longest = _longest(tokens)
        self._has_blanks, self._counts_spaces, self._composes = has_blanks, counts_spaces, composes

    def is_exceeded(self, text: str, most: int) -> bool:
        """Whether the text certainly has more than `most` tokens. Reads no more than that takes."""
        counts = np.zeros(256, np.int64)
        for piece in self._pieces(text):
            data = np.frombuffer(piece.encode(errors="surrogatepass"), np.uint8)
            counts += np.bincount(data, minlength=256)
            if (counts // self.longest).sum() > most:
                return True
        return False

    def _pieces(self, text: str) -> Iterator[str]:
        """The parts of the text with bytes that have shares, as the vocabulary writes them."""
        start = 0
        while start < len(text):
            end = start + PIECE
            while not _may_begin(text, end) and end > start + PIECE - NEAR:
                end -= 1
            piece, start = text[start:end], end
            if self._composes and not piece.isascii():
                is_composed = _composed(piece) == piece and _may_begin(text, end)
                piece = piece if is_composed else ""
            if not self._counts_spaces:
                piece = "".join(piece.split())
            yield piece.replace(" ", BLANK) if self._has_blanks else piece


def _may_begin(text: str, place: int) -> bool:
    """Whether NFC never joins the character here, or the end, with those before it."""
    return place >= len(text) or text[place] < "\x80" or "\u4e00" <= text[place] <= "\u9fff"


def _composed(text: str) -> str:
    from tokenizers import normalizers

    composed: str = normalizers.NFC().normalize_str(text)
    return composed


def _longest(tokens: Iterable[bytes]) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """The length of the longest token with each byte, 1 for a byte that no token has: [256]."""
    longest = [1] * 256
    for token in tokens:
        length = len(token)
        for byte in set(token) if length > 1 else ():
            if longest[byte] < length:
                longest[byte] = length
    return np.array(longest, np.int64)


_bounds: WeakKeyDictionary[Any, tuple[int, TextBound | None]] = WeakKeyDictionary()


def text_bound(tokenizer: Any) -> TextBound | None:
    """The bound of a tokenizer; None if a token of it may replace any number of bytes.

    It is made again if tokens were added.
    """
    if tokenizer is None:
        return None
    known = _bounds.get(tokenizer)
    if known is None or known[0] != len(tokenizer):
        known = _bounds[tokenizer] = len(tokenizer), _made(tokenizer)
    return known[1]


def _made(tokenizer: Any) -> TextBound | None:
    """The bound of a BPE tokenizer that has a token for each byte; None for others."""
    from tokenizers import models

    backend = _backend(tokenizer)
    if backend is None or not isinstance(backend.model, models.BPE):
        return None
    before, after = _steps(backend.normalizer), _steps(backend.pre_tokenizer)
    if before is None or after is None or not all(map(_keeps, (*before, *after))):
        return None
    kinds = [step["type"] for step in (*before, *after)]
    has_blanks = "Replace" in kinds or "Metaspace" in kinds
    is_byte_level = "ByteLevel" in kinds
    if is_byte_level and (has_blanks or kinds.count("ByteLevel") > 1):
        return None
    if not is_byte_level and not backend.model.byte_fallback:
        return None
    vocab, byte_names = _vocab(backend), BYTE_OF if is_byte_level else BYTE_NAMES
    if not byte_names.keys() <= vocab:
        return None
    added = backend.get_added_tokens_decoder().values()
    return TextBound(
        (*map(_byte_level if is_byte_level else str.encode, vocab), *_added(added, backend)),
        has_blanks=has_blanks,
        counts_spaces=not any(token.lstrip or token.rstrip for token in added),
        composes="NFC" in kinds,
    )


def _backend(tokenizer: Any) -> Any:
    """The tokenizer of `tokenizers` that encodes; None if others change the text before."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    for name in ("encode", "_encode_plus", "__call__"):
        if getattr(type(tokenizer), name) is not getattr(PreTrainedTokenizerFast, name):
            return None
    return tokenizer.backend_tokenizer


def _steps(step: Any) -> list[Mapping[str, Any]] | None:
    """The steps of a normalizer or pre-tokenizer; None if it is written in Python."""
    if step is None:
        return []
    try:
        state = json.loads(step.__getstate__())
    except Exception:  # it cannot be written
        return None
    steps = state.get("normalizers", state.get("pretokenizers", [state]))
    return [one for each in steps for one in each.get("pretokenizers", [each])]


def _keeps(step: Mapping[str, Any]) -> bool:
    """Whether a step is known to remove nothing from the text."""
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": " "} and step["content"] == BLANK)
    if step["type"] == "Metaspace" and step["replacement"] != BLANK:
        return False
    return step["type"] in KEEPING and step.get("behavior") != "Removed"


def _vocab(backend: Any) -> set[str]:
    """All tokens, read one by one, so that other threads run in between."""
    tokens = map(backend.id_to_token, range(backend.get_vocab_size()))
    vocab = {token for token in tokens if token is not None}
    has_all = len(vocab) == backend.get_vocab_size()  # the ids have no gaps
    return vocab if has_all else {*backend.get_vocab()}


def _byte_level(token: str) -> bytes:
    """The bytes of a token; none for an added token that is written as it is."""
    return bytes(BYTE_OF[char] for char in token) if BYTE_OF.keys() >= {*token} else b""


def _added(tokens: Iterable[Any], backend: Any) -> Iterator[bytes]:
    """The forms in which added tokens may be found in a text."""
    for token in tokens:
        forms = {token.content}
        if backend.normalizer is not None:
            forms.add(backend.normalizer.normalize_str(token.content))
        for form in forms:
            yield form.encode()
            yield form.replace(" ", BLANK).encode()
