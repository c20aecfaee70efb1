"""Pieces of llguidance's Lark: literals, patterns, and grammars that users write."""

import bisect
import json
import re

from nanovllm.utils.checks import shorten

MOST_LINES = 1_000  # of a grammar: rules that each need the next one overflow llguidance's stack
# For all schemas. Escapes such as \u0061 could write the name of a property, or of one that a
# pattern is for, as one that has any value: no string is written with them.
JSON_OPTIONS = {"coerce_one_of": False, "lenient": False, "json_allowed_escapes": '"\\bfnrt'}


def literal(text: str) -> str:
    """A text in Lark, which has JSON's escapes but takes no DEL as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def pattern_literal(pattern: str) -> str:
    """A regular expression in Lark; one that is not valid is a ValueError with the place in it."""
    from llguidance import LLMatcher

    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError("a backslash at the end has nothing to escape")
    written = f"/{_escaped(pattern)}/"
    error = LLMatcher.validate_grammar(f"start: TEXT\nTEXT: {written}")
    if error:
        raise ValueError(reason_in_pattern(pattern, error))
    return written


def _escaped(pattern: str) -> str:
    from llguidance import regex_to_lark

    return regex_to_lark(pattern, "")


def reason_in_pattern(pattern: str, error: str) -> str:
    """Why a pattern is not valid: the parser's reason, and the character that it underlines.

    Without a pattern, it is the one that the parser shows.
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
    """Lark of Lark or GBNF."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if grammar.lstrip().startswith("{"):
        raise ValueError("it must be Lark or GBNF, got JSON")
    lark = grammar
    if "::=" in grammar and not re.search(r"^\s*start\s*:(?!:)", grammar, re.MULTILINE):
        try:
            lark = gbnf_to_lark(grammar)
        except Exception as error:  # the parser raises plain ones, too
            raise ValueError(f"as GBNF, which ::= stands for: {error}") from None
    size = len(lark.splitlines()) + 2 * lark.count("$ref")
    if size > MOST_LINES:
        raise ValueError(f"it must have at most {MOST_LINES} lines, got {size}")
    return str(lark)
