"""TokenPieces: the text of single tokens, where it does not depend on the tokens around them.

It knows no sequence; a Detokenizer decodes the other tokens together with their neighbours.
"""

import json
import re
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

REPLACEMENT = "\ufffd"  # how `decode` writes bytes that are not UTF-8, or not yet
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")  # the name of a byte-fallback token
# The steps of decoders with which a token has the same text after any other token, unless it is
# part of a character or of a run of byte-fallback tokens. A first token may have another text.
SEPARABLE = (
    ["ByteLevel"],
    ["Metaspace"],
    ["ByteFallback", "Metaspace"],
    ["WordPiece"],
    ["Replace", "ByteFallback", "Fuse"],
    ["Replace", "ByteFallback", "Fuse", "Strip"],
)


class Piece(NamedTuple):
    """A token's text after another token, and how many characters it has as the first token."""

    text: str
    num_first: int


class TokenPieces(dict[int, "Piece | None"]):
    """The pieces of a tokenizer's tokens, by id; None for a token that needs its neighbours.

    A token is decoded at its first lookup. `cleans_up`: whether `decode` rewrites spaces before
    punctuation; then every token needs its neighbours. `are_known`: whether there are pieces, which
    depends on the kind of decoder.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        super().__init__()
        self.cleans_up = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        if self.cleans_up:
            from nanovllm.engine.requests.clean_up import cleans_up

            self.cleans_up = cleans_up(tokenizer)
        self._skip_special_tokens = skip_special_tokens
        self.are_known = not self.cleans_up and _is_separable(tokenizer)
        self._backend = tokenizer.backend_tokenizer if self.are_known else None

    def __missing__(self, token_id: int) -> Piece | None:
        if self._backend is None:
            return None
        piece = self[token_id] = self._piece(self._backend, token_id)
        return piece

    def _piece(self, backend: Any, token_id: int) -> Piece | None:
        once: str = backend.decode([token_id], self._skip_special_tokens)
        twice: str = backend.decode([token_id, token_id], self._skip_special_tokens)
        text = twice[len(once) :]
        # Without U+FFFD the text begins and ends with a whole character.
        if not text or not twice.startswith(once) or REPLACEMENT in twice:
            return None
        if byte_of(backend.id_to_token(token_id), twice) is not None:
            return None
        return Piece(text, len(once))


_pieces: WeakKeyDictionary[Any, dict[bool, TokenPieces]] = WeakKeyDictionary()


def token_pieces(tokenizer: Any, skip_special_tokens: bool) -> TokenPieces:
    """The pieces of a tokenizer, shared by all users. Tokens may be added, but not change."""
    pieces = _pieces.setdefault(tokenizer, {})
    if skip_special_tokens not in pieces:
        pieces[skip_special_tokens] = TokenPieces(tokenizer, skip_special_tokens)
    return pieces[skip_special_tokens]


def byte_of(name: str, twice: str) -> bytes | None:
    """The byte of the byte-fallback token with this name; None for any other token.

    `twice` is the text of two such tokens. A token with such a name may not be a byte.
    """
    match = BYTE_TOKEN.fullmatch(name) if len(twice) <= 2 else None
    return bytes.fromhex(match[1]) if match else None


def _is_separable(tokenizer: Any) -> bool:
    """Whether the tokenizer decodes by `tokenizers` alone, by steps that are SEPARABLE."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    for name in ("decode", "_decode"):
        if getattr(type(tokenizer), name) is not getattr(PreTrainedTokenizerFast, name):
            return False
    decoder = tokenizer.backend_tokenizer.decoder
    try:
        state = json.loads(decoder.__getstate__())
    except Exception:  # it has no decoder, or one in Python
        return False
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    strips = [step for step in steps if step["type"] == "Strip"]
    return [step["type"] for step in steps] in SEPARABLE and all(
        step["start"] <= 1 and step["stop"] == 0 for step in strips
    )
