"""How byte-level tokenizers write bytes: each as one character."""

# Printable bytes are their own character, the others are the characters from U+0100 on.
PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
OTHERS = (byte for byte in range(256) if byte not in PRINTABLE)
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(OTHERS)
}
