"""Explain errors of schemas and of tokens: llguidance's reason in users' words, and its place."""

import json
import re
import time
from collections.abc import Iterable
from typing import Any

from nanovllm.structured.lark import JSON_OPTIONS, reason_in_pattern
from nanovllm.structured.schemas import children

# The most seconds to search for a place, because each try compiles the schema. This is the thread's
# own time, so that results do not depend on the machine's other work.
MOST_SECONDS = 0.5
EXPLAINED = (
    (
        "oneOf constraints are not supported.*",
        "oneOf is supported for schemas that exclude each other alone; write anyOf, which allows"
        " what any of them allows",
    ),
    ("Unsatisfiable schema: (anyOf|oneOf) is empty", "there is nothing that it allows"),
)
TOKENS_EXPLAINED = (
    (
        'unknown special token: "(<[^"]*>)"; following special tokens are available: .*',
        r"tokens are named by their ids, such as <[5]>, got \1; a text stands in quotes",
    ),
    (r"Token range end too large: (\d+)", r"the vocabulary has no token \1"),
)


def explained(error: str, schemas: Iterable[tuple[str, Any]]) -> str:
    """The error of one of these schemas, with its place. Schemas are given with their places."""
    for root, schema in schemas:
        reason = _error_of(schema)
        if reason:
            place, value = _find(root, json.loads(json.dumps(schema)), reason)
            if "regex parse error" in reason or place.endswith("/pattern"):
                reason = reason_in_pattern(value if isinstance(value, str) else "", reason)
            for pattern, words in EXPLAINED:
                reason = re.sub(pattern, words, reason)
            return f"{reason} (at {place})"
    for pattern, words in TOKENS_EXPLAINED:
        error = re.sub(pattern, words, error)
    return error


def _error_of(schema: Any) -> str:
    """Why llguidance refuses a schema; "" if it does not."""
    from llguidance import LLMatcher

    if not isinstance(schema, dict):
        return ""
    options: Any = JSON_OPTIONS
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    return str(LLMatcher.validate_grammar(grammar))


def _find(root: str, schema: dict[str, Any], error: str) -> tuple[str, Any]:
    """The innermost part that causes the error, and its place: without it, the error changes.

    `schema` is changed during the search, and restored.
    """
    until = time.thread_time() + MOST_SECONDS

    def is_another() -> bool:
        """Whether the changed schema has another error or none."""
        return time.thread_time() < until and _error_of(schema) != error

    place, node = root, schema
    while True:
        for path, holder, key in _definitions_first(place, node):
            value, holder[key] = holder[key], True
            found = is_another()
            holder[key] = value
            if found and isinstance(value, dict):
                place, node = path, value
                break
        else:
            break
    named_first = sorted(
        node.items(), key=lambda item: not re.search(rf"\b{re.escape(item[0])}\b", error)
    )
    for name, value in named_first:
        if time.thread_time() >= until:
            break
        before = dict(node)
        del node[name]
        found = is_another()
        node.clear()
        node.update(before)
        if found:
            return f"{place}/{name}", value
    return place, node


def _definitions_first(place: str, node: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The schemas within a schema; definitions come before the schemas that refer to them."""
    definitions = (f"{place}/$defs/", f"{place}/definitions/")
    return sorted(children(node, place), key=lambda one: not one[0].startswith(definitions))
