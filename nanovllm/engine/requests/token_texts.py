"""The texts of single tokens, each decoded once for a tokenizer."""

from typing import Any
from weakref import WeakKeyDictionary

_texts: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()


def token_texts(tokenizer: Any) -> dict[int, str]:
    """The texts that are known, by token id; at most as many as the vocabulary has tokens."""
    return _texts.setdefault(tokenizer, {})


def token_text(token_id: int, tokenizer: Any, known: dict[int, str]) -> str:
    """The text of a single token, which becomes `known`; a part of a character is U+FFFD."""
    text = known.get(token_id)
    if text is None:
        text = known[token_id] = tokenizer.decode([token_id], skip_special_tokens=False)
    return text
