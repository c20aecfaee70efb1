"""The texts of single tokens, each decoded once for a tokenizer."""

from typing import Any
from weakref import WeakKeyDictionary

from nanovllm.engine.requests.token_pieces import token_pieces

_texts: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()


def token_texts(tokenizer: Any) -> dict[int, str]:
    """The texts that are known, by token id; at most as many as the vocabulary has tokens."""
    return _texts.setdefault(tokenizer, {})


def token_text(token_id: int, tokenizer: Any, known: dict[int, str]) -> str:
    """The text of a single token, which becomes `known`; a part of a character is U+FFFD.

    It has the space that a first token of a text may lose.
    """
    text = known.get(token_id)
    if text is None:
        piece = token_pieces(tokenizer, False)[token_id]
        if piece is not None:
            text = piece.text
        else:
            text = tokenizer.decode([token_id], skip_special_tokens=False)
        known[token_id] = text
    return text
