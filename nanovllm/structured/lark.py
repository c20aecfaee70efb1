"""Pieces of llguidance's Lark: literals, patterns, and grammars that users write."""

import bisect
import json
import re
from collections.abc import Iterator
from typing import Any

from nanovllm.structured.costs import check_lark, check_pattern
from nanovllm.structured.gbnf import gbnf_to_lark
from nanovllm.structured.patterns import portable, python_pattern
from nanovllm.structured.schemas import check_schema
from nanovllm.utils.checks import shorten
from nanovllm.utils.json_text import parse_json_at

MOST_LINES = 1_000  # of a grammar: longer chains of rules overflow llguidance's stack
# Options for all schemas. With escapes such as \u0061, the name of a property could be written so
# that its schema does not apply; so no string has such escapes.
JSON_OPTIONS = {"coerce_one_of": False, "lenient": False, "json_allowed_escapes": '"\\bfnrt'}

SPACING = {"item_separator", "key_separator", "whitespace_flexible", "whitespace_pattern"}
# %json, and texts, comments and patterns, which may contain "%json" with no meaning.
# A text or pattern without an end takes the rest of its line, so that each letter is read once.
LARK_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/?|%json(?!\w)')


def literal(text: str) -> str:
    """A text as a literal of Lark, which has JSON's escapes but does not allow a plain DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def pattern_literal(pattern: str) -> str:
    """A `regex` in Lark; an invalid one is a ValueError with the place of the error."""
    from llguidance import LLMatcher

    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError("a backslash at the end has nothing to escape")
    check_pattern(pattern)
    error = LLMatcher.validate_grammar(f"start: TEXT\nTEXT: /{_escaped(pattern)}/")
    if error:
        raise ValueError(reason_in_pattern(pattern, error))
    return f"/{_escaped(python_pattern(pattern))}/"


def _escaped(pattern: str) -> str:
    from llguidance import regex_to_lark

    return regex_to_lark(pattern, "")


def reason_in_pattern(pattern: str, error: str) -> str:
    """Why a pattern is not valid: the parser's reason, and the character that it underlines.

    Without `pattern`, the pattern is read from the parser's error.
    """
    found = re.search(r"regex parse error:\n {4}(.*)\n {4}( *)\^.*\nerror: (.*)", error)
    if found is None:
        other = re.search(r"lookarounds not supported yet; (\w+)", error)
        reason = f"anchors and word boundaries ({other[1]}) are not supported" if other else error
        return f"{reason}, in {shorten(pattern)}"
    shown, spaces, reason = found.groups()
    pattern, at = pattern or shown, len(spaces)
    if shown != pattern:
        ends = range(len(pattern))
        at = bisect.bisect_left(ends, at, key=lambda end: len(_escaped(pattern[:end])))
    return f"{reason}, at character {at + 1} of {shorten(pattern)}: {shorten(pattern[at:])}"


def lark_of(grammar: str) -> str:
    """Convert Lark or GBNF to Lark. Schemas in it are checked, and get our options."""
    if grammar.lstrip().startswith("{"):
        raise ValueError("it must be Lark or GBNF, got JSON")
    lark = grammar
    if "::=" in grammar and not re.search(r"^\s*start\s*:(?!:)", grammar, re.MULTILINE):
        try:
            lark = gbnf_to_lark(grammar)
        except ValueError as error:
            raise ValueError(f"as GBNF, which ::= stands for: {error}") from None
    size = len(lark.splitlines()) + 2 * lark.count("$ref")
    if size > MOST_LINES:
        raise ValueError(f"it must have at most {MOST_LINES} lines, got {size}")
    pieces, last = [], 0
    for place, schema, start, end in _schemas_in(lark):
        pieces += [lark[last:start], json.dumps(_with_options(place, schema))]
        last = end
    check_lark(lark)
    return "".join([*pieces, lark[last:]])


def schemas_in_lark(lark: str) -> list[tuple[str, Any]]:
    """The schemas in a grammar, with their places."""
    return [(place, schema) for place, schema, *_ in _schemas_in(lark)]


def _schemas_in(lark: str) -> Iterator[tuple[str, Any, int, int]]:
    """For each %json: its place, the schema, and where the schema starts and ends."""
    at = counted = 0
    line = 1
    while found := LARK_TOKEN.search(lark, at):
        at = found.end()
        if found[0] != "%json":
            continue
        while lark[at : at + 1].isspace():
            at += 1
        line += lark.count("\n", counted, at)
        counted, place = at, f"%json in line {line}"
        try:
            schema, end = parse_json_at(lark, at)
        except json.JSONDecodeError:
            continue  # llguidance reports the error
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        yield place, schema, at, end
        at = end


def _with_options(place: str, schema: Any) -> Any:
    """Add our options to a schema. It may set only llguidance's options of white space."""
    if not isinstance(schema, dict):
        return schema
    given = schema.get("x-guidance", {})
    if not isinstance(given, dict) or any(
        name not in SPACING and JSON_OPTIONS.get(name) != value for name, value in given.items()
    ):
        allowed = ", ".join(sorted(SPACING))
        raise ValueError(f"{place}/x-guidance: there may be {allowed} alone, got {shorten(given)}")
    schema = {name: value for name, value in schema.items() if name != "x-guidance"}
    check_schema(schema, place)
    return {"x-guidance": {**given, **JSON_OPTIONS}, **portable(schema)}
