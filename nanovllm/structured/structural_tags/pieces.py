"""Formats that are one piece: a text, a schema, a grammar, a pattern, tokens."""

import json

from nanovllm.structured.lark import JSON_OPTIONS, lark_of
from nanovllm.structured.patterns import portable
from nanovllm.structured.schemas import check_schema
from nanovllm.structured.structural_tags.formats import Format, count_of, text_of, texts_of
from nanovllm.structured.structural_tags.writer import Ends, GrammarWriter, none_of
from nanovllm.utils.checks import shorten


def const_string(writer: GrammarWriter, place: str, node: Format, ends: Ends) -> str:
    """`value` as it is."""
    value = text_of(f"{place}/value", node["value"])
    return f"{writer.mark(value, ends.final and not ends.marks)} {writer.marks(ends)}"


def json_schema(writer: GrammarWriter, place: str, node: Format, ends: Ends) -> str:
    """A JSON value of the schema."""
    place, schema = f"{place}/json_schema", node["json_schema"]
    for name, value in (("style", "json"), ("any_order", False)):
        if node.get(name, value) != value:
            raise ValueError(f"{place}: {name} must be {value!r}, got {shorten(node[name])}")
    if schema is not True and not isinstance(schema, dict):
        raise ValueError(f"{place} must be a JSON schema, got {shorten(schema)}")
    schema = {} if schema is True else schema
    check_schema(schema, place)
    written = json.dumps({"x-guidance": JSON_OPTIONS, **portable(schema)})
    return f"{writer.rule(f'%json {written}')} {writer.marks(ends)}"


def grammar(writer: GrammarWriter, place: str, node: Format, ends: Ends) -> str:
    """A text of the grammar."""
    text = text_of(f"{place}/grammar", node["grammar"])
    try:
        lark = lark_of(text)
    except ValueError as error:
        raise ValueError(f"{place}/grammar: {error}") from None
    nested = writer.rule(f"%lark {{\n{lark}\n}}")
    return f"{nested} {writer.marks(ends)}"


def regex(writer: GrammarWriter, place: str, node: Format, ends: Ends) -> str:
    """A text that the pattern matches."""
    pattern = text_of(f"{place}/pattern", node["pattern"])
    try:
        name = writer.pattern(pattern)
    except ValueError as error:
        raise ValueError(f"{place}/pattern: {error}") from None
    return writer.until(name, ends) if ends.marks else name


def any_text(writer: GrammarWriter, place: str, node: Format, ends: Ends) -> str:
    """Free text without the excluded texts."""
    return writer.free_text(place, texts_of(place, node, "excludes"), ends)


def token(writer: GrammarWriter, place: str, node: Format, ends: Ends) -> str:
    """One token."""
    mark = writer.mark_of(place, node)
    return f"{writer.mark(mark, ends.final and not ends.marks)} {writer.marks(ends)}"


def exclude_token(writer: GrammarWriter, place: str, node: Format, ends: Ends) -> str:
    """Any token except the excluded ones."""
    excluded = {*writer.token_ids(place, node, "exclude_tokens"), *writer.eos}
    return f"{none_of(excluded)} {writer.marks(ends)}"


def any_tokens(writer: GrammarWriter, place: str, node: Format, ends: Ends) -> str:
    """Free tokens without the excluded ones, at most `max_tokens`."""
    most = node.get("max_tokens")
    times = "*" if most is None else f"{{0,{count_of(f'{place}/max_tokens', most)}}}"
    excluded = writer.token_ids(place, node, "exclude_tokens")
    return writer.free_tokens(place, excluded, ends, times)
