"""The bytes of a token. A token that is part of a character has bytes, but no text of its own."""

from typing import Any

from nanovllm.engine.requests.byte_level import BYTE_OF
from nanovllm.engine.requests.token_pieces import BYTE_TOKEN, REPLACEMENT


def token_bytes(token_id: int, text: str, tokenizer: Any) -> list[int] | None:
    """The bytes of a token with this text; None if the tokenizer does not give them."""
    if REPLACEMENT not in text:
        return list(text.encode())
    token = str(tokenizer.convert_ids_to_tokens(token_id))
    if match := BYTE_TOKEN.fullmatch(token):
        return [int(match[1], 16)]
    values = [BYTE_OF[char] for char in token if char in BYTE_OF]
    return values if bytes(values).decode(errors="replace") == text else None
