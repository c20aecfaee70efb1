"""Read JSON, and calls that are JSON objects, from text that comes in pieces.

Exactly JSON (RFC 8259) is accepted: the part of a value that was read so far is always the
beginning of valid JSON.
"""

import json
import re
from collections.abc import Collection, Generator

from nanovllm.chat.tool_formats.base import Part, Reading
from nanovllm.chat.tool_formats.source import Source, Steps

CHARS = re.compile(r'[^"\\\x00-\x1f]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*')
CUT_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{0,3})?")
SCALAR_CHARS = re.compile(r"[-+.0-9a-zA-Z]*")
SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")


def skip_string(source: Source) -> Steps:
    """Skip a string."""
    if not (yield from source.skip('"')):
        return False
    while True:
        source.run(CHARS)
        rest = source.text[source.at : source.at + 6]
        if rest.startswith('"'):
            source.at += 1
            return True
        if source.ended or (rest and not CUT_ESCAPE.fullmatch(rest)):
            return False
        yield


def skip_value(source: Source) -> Steps:
    """Skip a value."""
    closers: list[str] = []  # of the objects and arrays that are open
    while True:
        if not (yield from _skip_opening(source, closers)):
            return False
        while closers:  # a value has ended
            yield from source.skip_space()
            if not (yield from source.skip(closers[-1])):
                break
            closers.pop()
        if not closers:
            return True
        if not (yield from source.skip(",")):
            return False
        if closers[-1] == "}" and not (yield from _skip_key(source)):
            return False


def _skip_opening(source: Source, closers: list[str]) -> Steps:
    """Skip a scalar, or an empty object or array, and all brackets that open before it."""
    while True:
        yield from source.skip_space()
        if not (yield from source.has_more()):
            return False
        char = source.text[source.at]
        if char == '"':
            return (yield from skip_string(source))
        if char not in "{[":
            return (yield from _skip_scalar(source))
        source.at += 1
        closer = "}" if char == "{" else "]"
        yield from source.skip_space()
        if (yield from source.skip(closer)):
            return True
        closers.append(closer)
        if char == "{" and not (yield from _skip_key(source)):
            return False


def _skip_key(source: Source) -> Steps:
    yield from source.skip_space()
    if not (yield from skip_string(source)):
        return False
    yield from source.skip_space()
    return (yield from source.skip(":"))


def _skip_scalar(source: Source) -> Steps:
    """Skip a number or a name when all of it is there: only then it is known to be valid."""
    begin = end = source.at
    while True:
        match = SCALAR_CHARS.match(source.text, end)
        assert match is not None
        end, match = match.end(), None
        if end < len(source.text) or source.ended:
            break
        yield
    if SCALAR.fullmatch(source.text, begin, end) is None:
        return False
    source.at = end
    return True


def read_string(source: Source) -> Generator[None, None, str | None]:
    """The value of a string; None if there is none."""
    begin = source.at
    if not (yield from skip_string(source)):
        return None
    text: str = json.loads(source.text[begin : source.at])
    return text


def read_arguments(source: Source) -> Reading:
    """Read an object, in parts of its text; return whether there is one."""
    if not (yield from source.has_more()) or source.text[source.at] != "{":
        return False
    begin, steps = source.at, skip_value(source)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            found: bool = stop.value
            break
        if source.at > begin:
            yield Part(arguments=source.text[begin : source.at])
            begin = source.at
        yield None
    if source.at > begin:
        yield Part(arguments=source.text[begin : source.at])
    return found


def read_call(source: Source, argument_keys: Collection[str]) -> Reading:
    """Read a call that is an object with a `name` and its arguments, in any order."""
    name: str | None = None
    arguments: list[Part] | None = None
    opener = "{"
    while (yield from source.skip(opener)):
        opener = ","
        yield from source.skip_space()
        key = yield from read_string(source)
        yield from source.skip_space()
        if key is None or not (yield from source.skip(":")):
            return False
        yield from source.skip_space()
        if key == "name" and name is None:
            name = yield from read_string(source)
            if not name:
                return False
            if arguments is not None:
                yield from [Part(name=name), *arguments]
        elif key in argument_keys and arguments is None:
            arguments = yield from _read_named_arguments(source, name)
            if arguments is None:
                return False
        elif key == "name" or key in argument_keys or not (yield from skip_value(source)):
            return False
        yield from source.skip_space()
    return name is not None and arguments is not None and (yield from source.skip("}"))


def _read_named_arguments(
    source: Source, name: str | None
) -> Generator[Part | None, None, list[Part] | None]:
    """Read the arguments of a call; return the parts that must wait for the call's name.

    None if there is no object.
    """
    if not (yield from source.has_more()) or source.text[source.at] != "{":
        return None
    if name is not None:
        yield Part(name=name)
        return [] if (yield from read_arguments(source)) else None
    begin = source.at
    found = yield from skip_value(source)
    return [Part(arguments=source.text[begin : source.at])] if found else None
