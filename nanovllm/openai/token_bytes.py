"""The bytes of a token. A token that is part of a character has bytes, but no text of its own."""

from typing import Any

from nanovllm.engine.requests.token_pieces import BYTE_TOKEN, REPLACEMENT

# Byte-level tokenizers write each byte as one character: printable bytes as their own character,
# the others as the characters from U+0100 on.
PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
OTHERS = (byte for byte in range(256) if byte not in PRINTABLE)
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(OTHERS)
}


def token_bytes(token_id: int, text: str, tokenizer: Any) -> list[int] | None:
    """The bytes of a token with this text; None if the tokenizer does not give them."""
    if REPLACEMENT not in text:
        return list(text.encode())
    token = str(tokenizer.convert_ids_to_tokens(token_id))
    if match := BYTE_TOKEN.fullmatch(token):
        return [int(match[1], 16)]
    values = [BYTE_OF[char] for char in token if char in BYTE_OF]
    return values if bytes(values).decode(errors="replace") == text else None
