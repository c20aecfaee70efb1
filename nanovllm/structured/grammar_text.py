"""Texts of grammars: what a request asks for, in llguidance's language."""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.structured.constraint import reason_of
from nanovllm.structured.lark import (
    JSON_OPTIONS,
    lark_of,
    literal,
    pattern_literal,
    schemas_in_lark,
)
from nanovllm.structured.patterns import portable, python_pattern
from nanovllm.structured.schemas import check_schema, without_neutral
from nanovllm.structured.structural_tags.formats import schemas_in
from nanovllm.structured.structural_tags.grammar import tag_grammar
from nanovllm.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def grammar_text(
    asked: StructuredOutputs, tokenizer: "LLTokenizer", added: Mapping[str, int]
) -> str:
    """The grammar in llguidance's language."""
    from llguidance import LLMatcher

    if asked.kind in ("json", "json_object"):
        schema = asked.json or '{"type":"object"}'
        if schema == "false":
            raise ValueError("there is nothing that the schema false allows")
        schema = "{}" if schema == "true" else schema
        value = json.loads(schema)
        check_schema(value)
        options: Any = {**JSON_OPTIONS, "whitespace_flexible": not asked.disable_any_whitespace}
        if asked.whitespace_pattern is not None:
            _check_whitespace(asked.whitespace_pattern, tokenizer)
            options["whitespace_pattern"] = python_pattern(asked.whitespace_pattern)
        written = json.dumps(portable(value), ensure_ascii=False)
        return LLMatcher.grammar_from_json_schema(written, overrides=options)
    if asked.regex is not None:
        return f"start: TEXT\nTEXT: {pattern_literal(asked.regex)}"
    if asked.choice is not None:
        return f"start: TEXT\nTEXT: {' | '.join(map(literal, asked.choice))}"
    if asked.grammar is not None:
        return lark_of(asked.grammar)
    return tag_grammar(json.loads(asked.structural_tag), added, tokenizer.eos_tokens)


def _check_whitespace(pattern: str, tokenizer: "LLTokenizer") -> None:
    """Refuse a pattern that matches anything but white space: the output would not be JSON."""
    from llguidance import LLMatcher

    try:
        rule = f"{pattern_literal(pattern)} & ~/[ \\t\\r\\n]*/"
    except ValueError as error:
        raise ValueError(f"whitespace_pattern: {error}") from None
    others = LLMatcher(tokenizer, f"start: OTHER\nOTHER: {rule}", log_level=0)
    if not others.is_error():
        others.compute_bitmask()
    if not others.is_error():  # something can begin
        raise ValueError(f"whitespace_pattern: {pattern!r} matches more than [ \\t\\r\\n]*")
    if "NoExtension" not in reason_of(others):
        raise ValueError(f"whitespace_pattern: {reason_of(others)}")


def schemas_of(asked: StructuredOutputs) -> Iterable[tuple[str, Any]]:
    """All schemas of a request, with their places."""
    found = [("#", json.loads(asked.json))] if asked.json is not None else []
    if asked.grammar is not None:
        found += schemas_in_lark(asked.grammar)
    if asked.structural_tag is not None:
        found += schemas_in(json.loads(asked.structural_tag))
    return ((root, without_neutral(schema)) for root, schema in found)
