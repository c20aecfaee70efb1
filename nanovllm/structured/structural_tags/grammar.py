"""Convert a structural tag to a grammar.

Both of vLLM's forms are read: `{"structures": [...], "triggers": [...]}`, and xgrammar's `{"type":
"structural_tag", "format": {...}}` with nested formats. A part without an end of its own (free
text, a pattern) is one lazy lexeme together with the text that must follow it, and so ends where
that text first occurs.
"""

from collections.abc import Collection, Mapping
from typing import Any

from nanovllm.structured.structural_tags import composed, pieces, triggered
from nanovllm.structured.structural_tags.formats import older_form
from nanovllm.structured.structural_tags.writer import Ends, GrammarWriter, WriteFormat
from nanovllm.utils.checks import shorten

FUNCTIONS: dict[str, WriteFormat] = {
    "const_string": pieces.const_string,
    "json_schema": pieces.json_schema,
    "grammar": pieces.grammar,
    "regex": pieces.regex,
    "any_text": pieces.any_text,
    "token": pieces.token,
    "exclude_token": pieces.exclude_token,
    "any_tokens": pieces.any_tokens,
    "sequence": composed.sequence,
    "or": composed.one_of,
    "optional": composed.optional,
    "star": composed.star,
    "plus": composed.plus,
    "repeat": composed.repeat,
    "tag": composed.tag,
    "tags_with_separator": composed.tags_with_separator,
    "triggered_tags": triggered.triggered_tags,
    "token_triggered_tags": triggered.token_triggered_tags,
    "dispatch": triggered.dispatch,
    "token_dispatch": triggered.token_dispatch,
}


def tag_grammar(described: Any, tokens: Mapping[str, int], eos_token_ids: Collection[int]) -> str:
    """The grammar of a structural tag. `tokens` are the added tokens by their texts."""
    if not isinstance(described, dict):
        raise TypeError(f"it must be an object, got {shorten(described)}")
    if described.get("type", "structural_tag") != "structural_tag":
        raise ValueError(f"type must be 'structural_tag', got {shorten(described['type'])}")
    writer = GrammarWriter(FUNCTIONS, tokens, eos_token_ids)
    fields = set(described) - {"type"}
    if fields == {"format"}:
        return _grammar(writer, "format", described["format"])
    if fields == {"triggers", "structures"}:
        try:
            return _grammar(writer, "", older_form(described))
        except (TypeError, ValueError) as error:  # its places are those of the newer form
            text = str(error).replace("/content/json_schema", "/schema")
            text = text.replace("/tags", "structures").replace("/triggers", "triggers")
            raise type(error)(text) from None
    raise ValueError(
        "it must have a `format` alone, or `triggers` and `structures` alone, got"
        f" {shorten([*described])}"
    )


def _grammar(writer: GrammarWriter, place: str, node: Any) -> str:
    start = writer.format(place, node, Ends(final=True))
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.rules])
