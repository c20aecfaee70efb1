"""Pieces of grammars in llguidance's Lark."""

import json
from collections.abc import Mapping
from typing import Any

from nanovllm.chat.tools import Tool
from nanovllm.structured.lark import JSON_OPTIONS

# JSON as templates write it: models know this form, and white space is limited.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

KEY = "/[A-Za-z_][A-Za-z0-9_]*/"  # a terminal for the names of parameters that no schema names


def quoted(text: str) -> str:
    """A literal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def json_value(schema: Mapping[str, Any]) -> str:
    """An expression for JSON that `schema` allows."""
    spaced = {**schema, "x-guidance": {**JSON_OPTIONS, **SPACING}}
    return f"%json {json.dumps(spaced, ensure_ascii=False)}"


def arguments_rule(name: str, tool: Tool) -> str:
    """A rule for the arguments of a call of `tool`, as a JSON object."""
    return f"{name}: {json_value({**tool.parameters, 'type': 'object'})}"


def any_of(name: str, count: int) -> str:
    """A rule for one of the rules `name_0`, `name_1`, ..."""
    return f"{name}: {' | '.join(f'{name}_{index}' for index in range(count))}"


def repeated(name: str, item: str, separator: str, several: bool) -> str:
    """A rule for an item, or if `several` for one or more of them."""
    return f"{name}: {item} ({separator} {item})*" if several else f"{name}: {item}"
