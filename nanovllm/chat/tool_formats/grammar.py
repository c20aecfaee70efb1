"""The grammar of an answer that is tool calls, or may be."""

import json
import re
from collections.abc import Callable

from nanovllm.chat.tool_formats.base import ToolFormat
from nanovllm.chat.tools import Tool, ToolChoice, checked_parameters
from nanovllm.structured.lark import JSON_OPTIONS
from nanovllm.structured_outputs import StructuredOutputs

ANY_TEXT = r"/(.|\n)*/"


def answer_grammar(
    tool_format: ToolFormat,
    choice: ToolChoice,
    literal: Callable[[str], str],
    asked: StructuredOutputs | None = None,
    blank_lines: bool = False,
) -> str:
    """A Lark grammar of calls; of calls or the JSON that is `asked` for; or of calls or text.

    `blank_lines` may come first, after reasoning. The arguments of calls fit their schemas.
    """
    is_free = not choice.required and asked is None
    tools = [Tool(tool.name, checked_parameters(tool)) for tool in choice.tools]
    rules, start = list[str](), "calls"
    write = literal
    if asked is not None:
        rules, start = [f"answer: %json {_json(asked)}"], "(calls | answer)"
    elif is_free:
        rules, start = _text_rules(tool_format, literal), "(calls | OTHER)"
        if not tool_format.first:
            write = lambda text: "open" if text == tool_format.marker else literal(text)  # noqa: E731
    rules += tool_format.grammar(tools, choice.several, write)
    blank = r'("\n" | "\n\n")? ' if blank_lines else ""
    return "\n".join(["%llguidance {}", f"start: {blank}{start}", *rules])


def _json(asked: StructuredOutputs) -> str:
    """The schema of an answer, with the options of its white space."""
    schema = json.loads(asked.json or '{"type": "object"}')
    if schema is False:
        raise ValueError("there is nothing that the schema false allows")
    if asked.whitespace_pattern is not None:
        raise ValueError("whitespace_pattern cannot be given where the answer may be tool calls")
    options = {**JSON_OPTIONS, "whitespace_flexible": not asked.disable_any_whitespace}
    fields = {} if schema is True else schema
    return json.dumps({**fields, "x-guidance": options}, ensure_ascii=False)


def _text_rules(tool_format: ToolFormat, literal: Callable[[str], str]) -> list[str]:
    """Rules for an answer that is no call, and for the text before one.

    Neither contains the marker: ordinary tokens could spell it even if it is a token of its own.
    """
    marker, first = tool_format.marker, tool_format.first
    other = f"OTHER: {ANY_TEXT}"
    if marker:
        other += rf" & ~/(.|\n)*{re.escape(marker)}(.|\n)*/"
    if first:
        return [rf"{other} & ~/[ \t\r\n]*{re.escape(first)}(.|\n)*/"]
    written = literal(marker)
    lazy = "" if written.startswith("<[") else "[lazy]"
    return [other, f"open{lazy}: OTHER {written}"]
