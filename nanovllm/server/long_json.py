"""Parse long JSON in pieces, so that other threads run in between.

`json.loads` keeps other threads waiting until its end. Here the data is cut after commas, and
inside long texts. A piece is completed by the brackets that are open before and after it, parsed,
and added to the lists and objects that are open.
"""

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

from nanovllm.server.limits import COST
from nanovllm.utils.checks import shorten
from nanovllm.utils.json_text import parse_json

PIECE = 1 << 16  # bytes
LIST, OBJECT, COMMA = b"[{,"
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
# Bytes of a text without escapes, and whole escapes: a pair of surrogates is one.
IN_TEXT = re.compile(
    rb'(?:[^"\\]+|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}"
    rb"(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?!\\u[dD][c-fC-F])(?=[^\\]|\\[^u]|\\u[0-9a-fA-F]{4})))*",
    re.DOTALL,
)
NAME = f'"{secrets.token_hex(16)}":'  # of what precedes a piece in an object; no data has it


class TooManyValuesError(ValueError):
    """The data has more values than allowed."""


class Piece(NamedTuple):
    """A part of the data, and the brackets that are open before and after it.

    It begins and ends after a comma or an opening bracket, or in a text: `in_text` and
    `after_comma` are about its start, `text_goes_on` and `has_comma` about its end. If it
    `is_text`, no text ends in it. `lowest` is the least number of open brackets in it.
    """

    start: int
    data: bytes
    opened: bytes
    left: bytes
    lowest: int
    in_text: bool
    text_goes_on: bool
    is_text: bool
    after_comma: bool
    has_comma: bool


def parse_long(data: bytes, max_values: int, max_depth: int) -> Any:
    """Parse JSON as `parse_json`, in pieces. Too many values are a `TooManyValuesError`."""
    pieces = [*_Cutter(max_values, max_depth).pieces(data)]  # counted before any is parsed
    built = _Built()
    for piece in pieces:
        built.add(piece)
    return built.root


class _Cutter:
    """Cuts data into pieces, counts values, and follows the brackets that are open."""

    def __init__(self, max_values: int, max_depth: int) -> None:
        self._max_values, self._max_depth = max_values, max_depth
        self._num_values = 1
        self._open = bytearray()

    def pieces(self, data: bytes) -> Iterator[Piece]:
        """The pieces, in order. Only the last one may end outside of all brackets."""
        start, in_text, after_comma = 0, False, False
        while start < len(data):
            is_last = start + PIECE >= len(data)
            raw = data[start : start + PIECE]
            masked = raw.replace(b"\\\\", b"__").replace(b'\\"', b"__")
            cut = len(raw) if is_last else _cut(raw, masked, in_text)
            parts = masked[:cut].split(b'"')
            opened = bytes(self._open)
            lowest = self._follow(b"".join(parts[in_text::2]))
            left = b"" if is_last else bytes(self._open)  # the parser finds what is missing
            goes_on = not is_last and (len(parts) - 1 + in_text) % 2 == 1
            if not is_last and not left:
                raise ValueError("it must be one object")
            while goes_on and cut > 1 and data[start + cut] & 0xC0 == 0x80:
                cut -= 1  # to the start of a character
            is_text = in_text and len(parts) == 1
            piece = raw[:cut]
            has_comma = not is_last and not goes_on and piece.endswith(b",")
            yield Piece(
                start,
                piece,
                opened,
                left,
                lowest,
                in_text,
                goes_on,
                is_text,
                after_comma,
                has_comma,
            )
            start, in_text, after_comma = start + cut, goes_on, has_comma

    def _follow(self, outside: bytes) -> int:
        """Count what is outside of texts; returns the least number of open brackets."""
        num_open = outside.count(b"[") + outside.count(b"{")
        self._num_values += outside.count(b",") + COST * num_open
        if self._num_values > self._max_values:
            raise TooManyValuesError
        lowest = len(self._open)
        for bracket in outside.translate(None, NOT_BRACKETS):
            if bracket in (LIST, OBJECT):
                self._open.append(bracket)
                if len(self._open) > self._max_depth:
                    raise ValueError(
                        f"it must have at most {self._max_depth} lists and objects in one another"
                        " (max_body_depth)"
                    )
            elif not self._open or self._open.pop() != bracket - 2:
                raise ValueError(f"{chr(bracket)!r} closes nothing")
            lowest = min(lowest, len(self._open))
        return lowest


def _cut(raw: bytes, masked: bytes, in_text: bool) -> int:
    """Where a piece ends: after the last comma or opening bracket, or else in the last text."""
    parts = masked.split(b'"')
    text = None  # the last one
    end = len(raw)
    for index in range(len(parts) - 1, -1, -1):
        begin = end - len(parts[index])
        if (index + in_text) % 2:
            text = text or (begin, end, index == len(parts) - 1)
        elif (place := max(map(parts[index].rfind, (b",", b"[", b"{")))) >= 0:
            return begin + place + 1
        end = begin - 1
    if text is not None:
        begin, end, goes_on = text
        match = IN_TEXT.match(raw, begin, end if goes_on else (begin + end) // 2)
        if match is not None and match.end() > 0:
            return match.end()
    raise ValueError(f"it has {len(raw)} bytes without a comma or a text")


class _Built:
    """The value so far. `_open` has its lists and objects to which the next piece adds."""

    def __init__(self) -> None:
        self.root: Any = None
        self._open: list[Any] = []
        self._text: list[str] = []  # the parts of a text that goes on

    def add(self, piece: Piece) -> None:
        """Parse a piece, and add its values."""
        value = _parsed(piece)
        if piece.start:
            self._extend(value, piece)
        else:
            self.root = value
        if piece.is_text and piece.text_goes_on:
            return
        del self._open[piece.lowest :]
        while len(self._open) < len(piece.left):
            self._open.append(_last(self._open[-1]) if self._open else self.root)
        if piece.text_goes_on:
            self._text = [_last(self._open[-1])]
        elif piece.has_comma and not self._open[-1]:
            raise ValueError(f"a value is missing before byte {piece.start + len(piece.data)}")

    def _extend(self, value: Any, piece: Piece) -> None:
        """Add what a piece has of each open list and object: all but the first value of `value`.

        The first value is that of the next bracket, or the rest of a text.
        """
        for depth, target in enumerate(self._open):
            is_last, first = depth == len(self._open) - 1, None
            if piece.in_text or not is_last:
                first = value.pop(0) if isinstance(value, list) else value.pop(NAME[1:-2])
            if is_last and piece.in_text:
                self._go_on(target, first, piece)
            elif is_last and piece.after_comma and not value:
                raise ValueError(f"a value is missing before byte {piece.start}")
            _add(target, value)
            value = first

    def _go_on(self, target: Any, text: Any, piece: Piece) -> None:
        """Add to the text that is the last value of `target`."""
        self._text.append(text)
        if not (piece.is_text and piece.text_goes_on):
            target[len(target) - 1 if isinstance(target, list) else next(reversed(target))] = (
                "".join(self._text)
            )


def _parsed(piece: Piece) -> Any:
    """The value of a piece between the brackets that are open before and after it."""
    before = "".join("[" if bracket == LIST else "{" + NAME for bracket in piece.opened)
    before = before + '"' if piece.in_text else before.removesuffix(NAME)
    after = '"' if piece.text_goes_on else ""
    after += "".join(chr(bracket + 2) for bracket in reversed(piece.left))
    data = piece.data[:-1] if piece.has_comma else piece.data
    try:
        return parse_json(f"{before}{data.decode()}{after}")
    except json.JSONDecodeError as error:
        if not piece.start:
            raise
        place = piece.start + max(0, error.pos - len(before))
        raise ValueError(f"{error.msg} near byte {place}") from None


def _last(target: Any) -> Any:
    return target[-1] if isinstance(target, list) else target[next(reversed(target))]


def _add(target: Any, values: Any) -> None:
    if isinstance(target, list):
        target += values
        return
    for name in () if target.keys().isdisjoint(values) else values:
        if name in target:
            raise ValueError(f"{shorten(name)} occurs twice")
    target.update(values)
