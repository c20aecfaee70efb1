"""What bytes a token stands for: that of a part of a character has no text, and still its bytes."""

from typing import Any

from nanovllm.engine.requests.detokenizer import BYTE_TOKEN, REPLACEMENT

# Byte-level tokenizers write a byte as a character: its own where that is printable, or the next
# one from U+0100 on.
PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
OTHERS = (byte for byte in range(256) if byte not in PRINTABLE)
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(OTHERS)
}


def token_bytes(token_id: int, text: str, tokenizer: Any) -> list[int] | None:
    """The bytes of a token whose text is `text`; None where the tokenizer does not tell."""
    if REPLACEMENT not in text:
        return list(text.encode())
    token = str(tokenizer.convert_ids_to_tokens(token_id))
    if match := BYTE_TOKEN.fullmatch(token):
        return [int(match[1], 16)]
    values = [BYTE_OF[char] for char in token if char in BYTE_OF]
    return values if bytes(values).decode(errors="replace") == text else None
