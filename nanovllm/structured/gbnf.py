"""Prepare GBNF for llguidance's converter to Lark.

Parts that the converter would change silently are written in another way, or refused with their
place.
"""

import re
from collections import Counter

# A text or class without an end takes the rest of its line, so that each letter is read once.
PARTS = re.compile(r'#[^\n]*|"(?:\\.|[^"\\\n])*"?|\[(?:\\.|[^\]\\\n])*\]?')
ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([^\w\s\"\\])|.)|[&~\[]", re.ASCII
)
RULE = re.compile(r"^[ \t]*([\w-]+)[ \t]*::=", re.MULTILINE)
LETTERS = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def gbnf_to_lark(grammar: str) -> str:
    """The grammar in Lark; ValueError if it is not valid."""
    from llguidance.gbnf_to_lark import gbnf_to_lark as convert

    twice = [name for name, count in Counter(RULE.findall(grammar)).items() if count > 1]
    if twice:
        raise ValueError(f"the rule {twice[0]!r} is given twice")
    plain = PARTS.sub(lambda part: _plain(part, grammar), grammar)
    try:
        return str(convert(plain))
    except Exception as error:  # the parser also raises plain ones
        raise ValueError(str(error)) from None


def _plain(part: "re.Match[str]", grammar: str) -> str:
    """A text or a class with characters in place of their numbers; comments do not change.

    The converter drops the zeros at the start of a number, and Rust's classes have operators.
    """
    text = part[0]
    if text.startswith("#") or text[1:][-1:] not in ('"', "]"):  # the converter has an error for it
        return text

    def character(found: "re.Match[str]") -> str:
        number = found[1] or found[2] or found[3]
        if number is None and found[4] is None and found[0].startswith("\\"):
            return found[0]
        code = int(number, 16) if number else ord(found[4] or found[0])
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            line = grammar.count("\n", 0, part.start()) + 1
            raise ValueError(f"{found[0]} is no character, in line {line}: {text}")
        return _in_class(chr(code)) if text[0] == "[" else _in_text(chr(code))

    if text[0] == '"':
        changed = ESCAPE.sub(character, text)
        return f"({changed})" if '" [' in changed else changed
    start = 2 if text.startswith("[^") else 1
    inner = re.sub(r"^-|(?<!\\)-$|(?<=[^-\\]-)-", r"\\x2d", text[start:-1])
    return f"{text[:start]}{ESCAPE.sub(character, inner)}]"


def _in_class(char: str) -> str:
    if char in LETTERS:
        return LETTERS[char]
    return f"\\x{ord(char):02x}" if "\x0f" < char < "\x80" else char


def _in_text(char: str) -> str:
    """A character in a text. Lark's texts have no control characters: a class replaces them."""
    if char in '"\\':
        return "\\" + char
    if char in LETTERS:
        return LETTERS[char]
    return f'" [{_in_class(char)}] "' if char < " " or char == "\x7f" else char
