r"""Patterns for llguidance, which reads Rust's, with the meaning that they have for their users.

Rust's `\d`, `\w` and `\s` have all of Unicode's digits, letters and blanks, and its classes have
operators. In JSON schemas patterns are ECMAScript's, where `\d` and `\w` are ASCII. A `regex` is
Python's: whatever is generated, `re.fullmatch` matches. So `\d`, `\w` and `\s` are ASCII there,
too, and `\D`, `\W` and `\S` have what is no digit, letter or blank in all of Unicode.
A `regex` that begins with `(?u)` has Python's own classes.
"""

import functools
import json
import re
import sys
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

from nanovllm.structured.schemas import subschemas, without_neutral


class Classes(NamedTuple):
    r"""The characters of `\d`, `\w` and `\s`, as the content of a class.

    `sure` has those that every reader counts, and `all` those that any reader counts. `others` has
    those of `\D`, `\W` and `\S`, where they can be written.
    """

    sure: dict[str, str]
    all: dict[str, str]
    others: dict[str, str]

    def of(self, letter: str) -> str:
        r"""The class that `\` and the letter stand for."""
        return f"[^{self.all[letter.lower()]}]" if letter.isupper() else f"[{self.sure[letter]}]"

    def within(self, letter: str, is_negated: bool) -> str:
        """The same as a member of another class, which excludes it if it is negated."""
        if letter.isupper():
            inner = (self.sure if is_negated else self.all)[letter.lower()]
            return self.others.get(letter, f"[^{inner}]")
        return (self.all if is_negated else self.sure)[letter]


ASCII = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t-\r\x20"}
BLANKS = r"\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"  # ECMAScript's others
ECMA = ASCII | {"s": ASCII["s"] + BLANKS}
# Without classes in classes: a grammar in a grammar is written twice.
ECMA_CLASSES = Classes(ECMA, ECMA, {
    "D": r"\x00-/:-\x{10ffff}",
    "W": r"\x00-/:-@\[-\^`\{-\x{10ffff}",
    "S": r"\x00-\x08\x0e-\x1f!-\x9f\xa1-\u167f\u1681-\u1fff\u200b-\u2027\u202a-\u202e"
    r"\u2030-\u205e\u2060-\u2fff\u3001-\ufefe\uff00-\x{10ffff}",
})  # fmt: skip
# Rust's Unicode is as new as any Python's; only Python counts these as letters and blanks.
PYTHON_CLASSES = Classes(ASCII, {"d": r"\d", "w": r"\w\p{L}\p{N}", "s": r"\s\x1c-\x1f"}, {})

FLAGS = re.compile(r"\(\?([a-zA-Z]+)\)")
ATOM = re.compile(
    r"\\(?:[xuU]\{[^}]*\}|x..|u.{4}|U.{8}|[pP]\{[^}]*\}|[pP].|.)|\[:\^?\w+:\]|.", re.DOTALL
)
REPETITION = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}")
MOST_WRITTEN = 1 << 20  # characters of a pattern in Rust's form: Python's `\w` has 12,700
NO_POSSESSIVE = "possessive repetitions, with + behind another repetition, are not supported"


def python_pattern(pattern: str) -> str:
    """A `regex` in Rust's form. A ValueError if it has possessive repetitions, or gets too long."""
    flags = FLAGS.match(pattern)
    has_all = flags is not None and "u" in flags[1]
    is_verbose = flags is not None and "x" in flags[1]
    classes = PYTHON_CLASSES
    if has_all:
        classes = Classes(_pythons_classes(), _pythons_classes(), {})
    return _joined(_parts(pattern, classes, is_verbose, is_python=True))


def ecma_pattern(pattern: str) -> str:
    """A pattern of a JSON schema in Rust's form."""
    return _joined(_parts(pattern, ECMA_CLASSES, is_verbose=False, is_python=False))


def portable(schema: Any) -> Any:
    """The schema for llguidance: without neutral keywords, and with patterns in Rust's form."""
    schema = without_neutral(schema)
    if not any(_has_patterns(part) for _, part in subschemas(schema)):
        return schema
    schema = json.loads(json.dumps(schema))  # a copy
    for _, part in subschemas(schema):
        if isinstance(part.get("pattern"), str):
            part["pattern"] = ecma_pattern(part["pattern"])
        if isinstance(named := part.get("patternProperties"), dict):
            part["patternProperties"] = _renamed(named)
    return schema


def _has_patterns(part: dict[str, Any]) -> bool:
    return "pattern" in part or "patternProperties" in part


def _renamed(named: dict[str, Any]) -> dict[str, Any]:
    """The schemas by patterns in Rust's form. Equal ones get a group that matches nothing."""
    renamed: dict[str, Any] = {}
    for pattern, schema in named.items():
        written = ecma_pattern(pattern)
        while written in renamed:
            written += "(?:)"
        renamed[written] = schema
    return renamed


def _joined(parts: Iterator[str]) -> str:
    """The whole pattern. Raises before it has more than MOST_WRITTEN characters."""
    written, size = [], 0
    for part in parts:
        size += len(part)
        if size > MOST_WRITTEN:
            raise ValueError(
                f"a pattern must have at most {MOST_WRITTEN} characters with its classes written"
                " out, got more"
            )
        written.append(part)
    return "".join(written)


def _parts(pattern: str, classes: Classes, is_verbose: bool, is_python: bool) -> Iterator[str]:
    """The pattern part by part, with the classes written out."""
    at, is_repeated = 0, False
    while at < len(pattern):
        if pattern.startswith("(?", at):
            part, at, is_repeated = "(?", at + 2, False
        elif found := REPETITION.match(pattern, at):
            if is_python and is_repeated and found[0] == "+":
                raise ValueError(NO_POSSESSIVE)
            part, at, is_repeated = found[0], found.end(), not is_repeated
        elif pattern[at] == "[":
            at = yield from _class(pattern, at, classes)
            part, is_repeated = "", False
        else:
            atom = ATOM.match(pattern, at)
            part, at, is_repeated = atom[0] if atom else pattern[at], at, False
            if is_verbose and part == "#":
                at, part = at + len(pattern[at:].partition("\n")[0]), ""
            at += len(part)
            if is_verbose and part.isspace():
                part = _verbose_blank(part)
            if part[:1] == "\\" and part[1:] in tuple("dwsDWS"):
                part = classes.of(part[1])
        yield part


def _verbose_blank(char: str) -> str:
    """White space outside of classes with `(?x)`: Python skips less of it than Rust."""
    return "" if char in " \t\n\r\v\f" else f"\\x{{{ord(char):x}}}"


def _class(pattern: str, start: int, classes: Classes) -> Generator[str, None, int]:
    """The members of the class that begins here, without operators. Returns its end.

    One that does not end, or has a range of classes, stays as it is: llguidance refuses it.
    """
    is_negated = pattern.startswith("^", start + 1)
    at = first = start + 1 + is_negated
    yield "[^" if is_negated else "["
    while at < len(pattern) and (pattern[at] != "]" or at == first):
        low = ATOM.match(pattern, at)
        assert low is not None
        at = low.end()
        is_range = pattern[at : at + 1] == "-" and pattern[at + 1 : at + 2] not in ("]", "")
        if not is_range:
            yield _member(low[0], classes, is_negated)
            continue
        high = ATOM.match(pattern, at + 1)
        assert high is not None
        at = high.end()
        ends = [one if one[1:] in tuple("dwsDWS") else _member(one) for one in (low[0], high[0])]
        yield "-".join(ends)
    yield pattern[at : at + 1]
    return at + 1


def _member(atom: str, classes: Classes = ECMA_CLASSES, is_negated: bool = False) -> str:
    """A member of a class; a plain character is escaped if it could be an operator or a blank."""
    if atom[0] == "\\" and atom[1:] in tuple("dwsDWS"):
        return classes.within(atom[1], is_negated)
    if len(atom) > 1:
        return atom
    if atom.isspace():
        return f"\\x{{{ord(atom):x}}}"
    return f"\\{atom}" if atom in r"[]&~-^#\\" else atom


@functools.cache
def _pythons_classes() -> dict[str, str]:
    """The classes of Python's `re`, as ranges; takes a fraction of a second."""
    chars = "".join(map(chr, (*range(0xD800), *range(0xE000, sys.maxunicode + 1))))
    return {letter: _ranges(re.findall(rf"\{letter}", chars)) for letter in "dws"}


def _ranges(chars: list[str]) -> str:
    """Characters in order as the content of a class."""
    ranges: list[list[int]] = []
    for code in map(ord, chars):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in ranges)
