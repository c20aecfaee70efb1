"""The bytes of a token. A token that is part of a character has bytes, but no text of its own."""

from typing import Any
from weakref import WeakKeyDictionary

from nanovllm.engine.requests.byte_level import BYTE_OF
from nanovllm.engine.requests.token_pieces import BYTE_TOKEN, REPLACEMENT

_bytes: WeakKeyDictionary[Any, dict[int, tuple[int, ...] | None]] = WeakKeyDictionary()


def token_bytes(token_id: int, text: str, tokenizer: Any) -> list[int] | None:
    """The bytes of a token with this text; None if the tokenizer does not give them."""
    if REPLACEMENT not in text:
        return list(text.encode())
    known = _bytes.setdefault(tokenizer, {})  # at most as many as the vocabulary has tokens
    if token_id not in known:
        known[token_id] = _bytes_of(token_id, text, tokenizer)
    found = known[token_id]
    return None if found is None else list(found)


def _bytes_of(token_id: int, text: str, tokenizer: Any) -> tuple[int, ...] | None:
    token = str(tokenizer.convert_ids_to_tokens(token_id))
    if match := BYTE_TOKEN.fullmatch(token):
        return (int(match[1], 16),)
    values = tuple(BYTE_OF[char] for char in token if char in BYTE_OF)
    return values if bytes(values).decode(errors="replace") == text else None
