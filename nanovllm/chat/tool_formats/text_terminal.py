"""Terminals in llguidance's Lark for strings without quotes that a JSON schema describes."""

import re
from collections.abc import Mapping
from typing import Any

from nanovllm.chat.tool_formats.lark import quoted
from nanovllm.chat.tool_formats.parameters import pointed_at, types_of

ANY_TEXT = "/(?s:.*)/"
# Parts of a pattern: an escaped character, a set of characters, a bracket or a bar.
PATTERN_PARTS = re.compile(r"\\(?s:.)|\[(?:\\(?s:.)|[^\]\\])*\]|[()|]")
REFUSED = ("format", "oneOf")
MOST_LEVELS = 20


def text_terminal(schema: Any, root: Mapping[str, Any], level: int = 0) -> str:
    """An expression for the texts that `schema` allows; `root` has the definitions.

    A keyword that an expression cannot follow is a ValueError.
    """
    if not isinstance(schema, Mapping):
        return ANY_TEXT
    if level > MOST_LEVELS:
        raise ValueError(f"schemas of text must not be within each other {level} times")
    found = [name for name in REFUSED if name in schema]
    if found:
        raise ValueError(f"{found[0]} is not supported for text without quotes")
    parts = [ANY_TEXT]
    for name in ("const", "enum"):
        if name in schema:
            values = schema[name] if name == "enum" else [schema[name]]
            texts = [quoted(value) for value in values if isinstance(value, str)]
            parts.append(f"({' | '.join(texts)})")
    if "minLength" in schema or "maxLength" in schema:
        most = schema.get("maxLength", "")
        parts.append(f"/(?s:.{{{int(schema.get('minLength', 0))},{most}}})/")
    if "pattern" in schema:
        parts.append(_pattern(schema["pattern"]))
    parts += [text_terminal(part, root, level + 1) for part in schema.get("allOf", ())]
    if "anyOf" in schema:
        texts = [part for part in schema["anyOf"] if "string" in types_of(part, root)]
        ways = [text_terminal(part, root, level + 1) for part in texts]
        parts.append(f"({' | '.join(ways)})")
    if "$ref" in schema:
        parts.append(text_terminal(pointed_at(schema["$ref"], root), root, level + 1))
    return " & ".join(parts)


def _pattern(pattern: str) -> str:
    """Texts in which a part matches the pattern, by JSON Schema's dialect."""
    from llguidance import regex_to_lark

    found = "|".join(map(_anywhere, _alternatives(pattern)))
    return f"/{regex_to_lark(found, 'dw')}/"


def _anywhere(pattern: str) -> str:
    """A pattern for whole texts in which `pattern`, without a bar, matches a part."""
    before, after = "(?s:.*)", "(?s:.*)"
    if pattern.startswith("^"):
        before, pattern = "", pattern[1:]
    if pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2:
        after, pattern = "", pattern[:-1]
    return f"{before}({pattern}){after}"


def _alternatives(pattern: str) -> list[str]:
    """The parts of a pattern between bars outside of brackets."""
    depth, begin, parts = 0, 0, list[str]()
    for match in PATTERN_PARTS.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if match[0] == "|" and depth == 0:
            parts.append(pattern[begin : match.start()])
            begin = match.end()
    return [*parts, pattern[begin:]]
