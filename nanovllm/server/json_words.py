"""Errors of checks in the words of JSON, which a client has sent: those of Python are in Python."""

import ast
import json
import re

QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
VALUE = re.compile(rf"(?:{QUOTED}|[^;'\"])*")  # what an error quotes, up to its hint
CONSTANTS = {"None": "null", "True": "true", "False": "false"}
NAMES = {
    **CONSTANTS, "a dict": "an object", "a list": "an array", "lists of": "arrays of",
    "an int": "an integer",
}  # fmt: skip
WORD = re.compile(rf"(?<!\w)(?:{QUOTED})|\b(?:{'|'.join(NAMES)})\b")


def in_json_words(message: str) -> str:
    """The message of a check, `NAME must be ALLOWED, got VALUE`, with the value as JSON."""
    head, got, rest = message.partition(", got ")
    end = VALUE.match(rest).end()  # type: ignore[union-attr] # it matches nothing, too
    head = WORD.sub(lambda found: NAMES.get(found[0], found[0]), head)
    return head + got + WORD.sub(lambda found: _of_value(found[0]), rest[:end]) + rest[end:]


def _of_value(word: str) -> str:
    """A word, or a quoted text, in a value of Python as JSON has it."""
    if word.startswith("'"):
        try:
            word = json.dumps(ast.literal_eval(word), ensure_ascii=False)
            return word.encode(errors="backslashreplace").decode()  # halves of characters
        except (SyntaxError, ValueError):  # it is cut, or no text of Python
            return word
    return CONSTANTS.get(word, word)
