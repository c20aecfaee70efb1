"""Read literals of Python or JSON from text that comes in pieces, and write them as JSON.

Nothing is evaluated. Accepted are strings in quotes of both kinds, also in three of them, numbers,
`True`, `False`, `None` and JSON's words for them, lists, and dicts with strings as keys. A comma
may come before a closing bracket. In a string, line breaks and backslashes that begin no escape
stand for themselves, and a slash may have one before it as in JSON.
"""

import json
import math
import re
from collections.abc import Generator

from nanovllm.chat.tool_formats.base import Part, Reading
from nanovllm.chat.tool_formats.json_reader import SCALAR
from nanovllm.chat.tool_formats.source import Source

CLOSERS = {"{": "}", "[": "]"}
QUOTES = ('"""', "'''", '"', "'")
PLAIN = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4})"
    r"|([0-7]{1,3})|((?s:.)))"
)
CUT_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|[0-7]{1,2})?")
LETTERS = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": "",
    **{char: char for char in "\"'\\/"},
}  # fmt: skip
SCALAR_CHARS = re.compile(r"[-+.0-9a-zA-Z_]*")
WORDS = {"True": "true", "False": "false", "None": "null"}


def read_value(source: Source) -> Reading:
    """Skip a value and yield it as JSON; return whether there is one."""
    closers: list[str] = []  # of the dicts and lists that are open
    while True:
        if not (yield from _read_opening(source, closers)):
            return False
        while closers:  # a value has ended
            is_more = yield from source.skip_comma()
            if (yield from source.skip(closers[-1])):
                yield Part(arguments=closers.pop())
                continue
            if not is_more:
                return False
            yield Part(arguments=", ")
            break
        else:
            return True
        if closers[-1] == "}" and not (yield from _read_key(source)):
            return False


def _read_opening(source: Source, closers: list[str]) -> Reading:
    """Read a scalar, or an empty dict or list, and all brackets that open before it."""
    while True:
        yield from source.skip_space()
        if not (yield from source.has_more()):
            return False
        char = source.text[source.at]
        if char in PLAIN:
            return (yield from read_string(source))
        if char not in CLOSERS:
            return (yield from _read_scalar(source))
        source.at += 1
        yield Part(arguments=char)
        yield from source.skip_space()
        if (yield from source.skip(CLOSERS[char])):
            yield Part(arguments=CLOSERS[char])
            return True
        closers.append(CLOSERS[char])
        if char == "{" and not (yield from _read_key(source)):
            return False


def _read_key(source: Source) -> Reading:
    yield from source.skip_space()
    if not (yield from read_string(source)):
        return False
    yield from source.skip_space()
    if not (yield from source.skip(":")):
        return False
    yield Part(arguments=": ")
    return True


def read_string(source: Source) -> Reading:
    """Skip a string and yield it as JSON."""
    for quotes in QUOTES:
        if (yield from source.skip(quotes)):
            break
    else:
        return False
    yield Part(arguments='"')
    while (yield from source.has_more()):
        if run := source.run(PLAIN[quotes[0]]):
            yield Part(arguments=in_json(run))
        elif (yield from source.skip(quotes)):
            yield Part(arguments='"')
            return True
        elif source.text[source.at] == "\\":
            text = yield from _read_escape(source)
            if text is None:
                return False
            if text:  # in ASCII: the halves of a character may come one by one
                yield Part(arguments=json.dumps(text)[1:-1])
        else:  # one quote where three are needed
            source.at += 1
            yield Part(arguments=in_json(quotes[0]))
    return False


def in_json(text: str) -> str:
    """A part of a string as it is written in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _read_escape(source: Source) -> Generator[None, None, str | None]:
    """The text that an escape stands for; None at a backslash that ends the text."""
    while not source.ended and CUT_ESCAPE.fullmatch(source.text, source.at):
        yield
    match = ESCAPE.match(source.text, source.at)
    if match is None:
        return None
    source.at = match.end()
    *codes, octal, char = match.groups()
    if octal:
        return chr(int(octal, 8))
    code = next(filter(None, codes), None)
    return chr(int(code, 16)) if code else LETTERS.get(char, "\\" + char)


def _read_scalar(source: Source) -> Reading:
    begin = source.at
    word = yield from source.skip_all(SCALAR_CHARS)
    text = _scalar(word)
    if text is None:
        source.at = begin
        return False
    yield Part(arguments=text)
    return True


def _scalar(word: str) -> str | None:
    """A number or a word in JSON; None if it is neither."""
    if SCALAR.fullmatch(word) or word in WORDS:
        return WORDS.get(word, word)
    try:
        return str(int(word, 0))
    except ValueError:  # no integer, or one with too many digits for Python
        pass
    if not set(word) & set(".eE"):
        return None
    try:
        number = float(word)
    except ValueError:
        return None
    return repr(number) if math.isfinite(number) else None
