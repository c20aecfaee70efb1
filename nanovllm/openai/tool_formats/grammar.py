"""The grammar of an answer that is tool calls, or may be."""

import json
import re
from collections.abc import Callable

from nanovllm.engine.requests.lark import JSON_OPTIONS
from nanovllm.openai.tool_formats.base import ToolFormat
from nanovllm.openai.tools import Tool, ToolChoice, checked_parameters
from nanovllm.structured_outputs import StructuredOutputs

ANY_TEXT = r"/(.|\n)*/"


def answer_grammar(
    tool_format: ToolFormat,
    choice: ToolChoice,
    literal: Callable[[str], str],
    asked: StructuredOutputs | None = None,
    blank_lines: bool = False,
) -> str:
    """Lark of calls, of calls or the JSON that is `asked` for, or of calls or text.

    `blank_lines` may come first, behind reasoning. The arguments of calls are of their schemas.
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
    options = {**JSON_OPTIONS, "whitespace_flexible": not asked.disable_any_whitespace}
    if asked.whitespace_pattern is not None:
        options["whitespace_pattern"] = asked.whitespace_pattern
    fields = {} if schema is True else schema
    return json.dumps({**fields, "x-guidance": options}, ensure_ascii=False)


def _text_rules(tool_format: ToolFormat, literal: Callable[[str], str]) -> list[str]:
    """Rules for an answer that is no call, and for the text before one."""
    marker, first = tool_format.marker, tool_format.first
    written = literal(marker) if marker else ""
    is_token = written.startswith("<[")
    if first:
        others = rf"{ANY_TEXT} & ~/[ \t\r\n]*{re.escape(first)}(.|\n)*/"
        if written and not is_token:
            others += rf" & ~/(.|\n)*{re.escape(marker)}(.|\n)*/"
        return [f"OTHER: {others}"]
    opening = f"open: OTHER {written}" if is_token else f"open[lazy]: OTHER {written}"
    return [f"OTHER: {ANY_TEXT}", opening]
