"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

There is a line for each of the tags and for each value.
"""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from nanovllm.chat.tool_formats.base import WHOLE, Part, Reading, ToolFormat
from nanovllm.chat.tool_formats.lark import KEY, any_of, json_value, quoted, repeated
from nanovllm.chat.tool_formats.literal_reader import in_json, read_value
from nanovllm.chat.tool_formats.parameters import (
    ANYTHING,
    Parameter,
    others_of,
    parameter_types,
    parameters_of,
    type_of,
    types_of,
)
from nanovllm.chat.tool_formats.source import Source, Steps
from nanovllm.chat.tool_formats.text_terminal import text_terminal
from nanovllm.chat.tools import Tool

START, END = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
NAME = re.compile(r"[^<>\n]*")
LINE = "\n"
NO_CONTAINER = r"~/\s*[\[{](?s:.*)/ & /(?s:.*)/"
TEXT = frozenset(["string"])


class Qwen3Coder(ToolFormat):
    """A value is text if the tool's schema says so or gives no types; else it is a literal.

    Literals are those of JSON or, as templates write them, of Python. If the schema allows text and
    other types, a value that is not a literal of these types is text. If the schema does not allow
    text, a list or an object must be well-formed; any other value that is not a literal is text.
    """

    marker = START
    markers = (START, END)  # the other tags are plain text: a value ends at its closing tag

    def read(self, source: Source, tools: Sequence[Tool]) -> Reading:
        """Read one call; the end of the answer may replace the last mark."""
        yield from source.skip(START)
        yield from source.skip_space()
        if not (yield from source.skip(FUNCTION)):
            return False
        name = yield from source.skip_all(NAME)
        if not name or not (yield from source.skip(">")):
            return False
        tool = next((tool for tool in tools if tool.name == name), None)
        yield Part(name=name)
        opener = "{"
        yield from source.skip_space()
        while (yield from source.skip(PARAMETER)):
            key = yield from source.skip_all(NAME)
            if not key or not (yield from source.skip(">")):
                return False
            yield Part(arguments=f'{opener}"{in_json(key)}": ')
            opener = ", "
            if not (yield from _read_value(source, parameter_types(tool, key))):
                return False
            yield from source.skip_space()
        if not (yield from source.skip(END_FUNCTION)):
            return False
        yield Part(arguments="}" if opener == ", " else "{}")
        yield from source.skip_space()
        if (yield from source.skip_last(END)):
            yield WHOLE
        return True

    def grammar(
        self, tools: Sequence[Tool], several: bool, literal: Callable[[str], str]
    ) -> list[str]:
        """Calls on lines of their own, parameters in the order of the properties."""
        start, end = literal(START), literal(END)
        rules = [repeated("calls", "call", quoted("\n"), several), any_of("call", len(tools))]
        texts = dict[str, str]()  # the names of rules, by the terminals of values
        for index, tool in enumerate(tools):
            head = quoted(f"\n{FUNCTION}{tool.name}>\n")
            parameters, others = parameters_of("qwen3_coder", tool, NAME), others_of(tool)
            lines = " ".join(_parameter(tool, parameter, texts) for parameter in parameters)
            if others is not None:
                lines = (
                    f"({quoted(PARAMETER)} KEY {quoted(f'>{LINE}')} {_other(tool, others, texts)})*"
                )
            tail = quoted(f"{END_FUNCTION}\n")
            rules.append(f"call_{index}: {start} {head} {lines} {tail} {end}")
        for terminal, name in texts.items():
            rules.append(f"{name}[lazy]: {name.upper()} {quoted(f'{LINE}{END_PARAMETER}')}")
            rules.append(f"{name.upper()}: {terminal} & ~/(?s:.*)<\\/parameter>(?s:.*)/")
        return [*rules, f"KEY: {KEY}"]


def _other(tool: Tool, schema: Mapping[str, Any], texts: dict[str, str]) -> str:
    """An expression for the value of a parameter without a schema, and the mark after it.

    If its type is not known, a value that looks like a list or an object must be one.
    """
    if types_of(schema, schema) != ANYTHING:
        return _value(tool, "additionalProperties", schema, texts)
    name = texts.setdefault(NO_CONTAINER, f"text_{len(texts)}")
    container = json_value({**schema, "type": ["object", "array"]})
    return f"({name} {quoted(LINE)} | {container} {quoted(f'{LINE}{END_PARAMETER}{LINE}')})"


def _parameter(tool: Tool, parameter: Parameter, texts: dict[str, str]) -> str:
    """An expression for the lines of a parameter."""
    head = quoted(f"{PARAMETER}{parameter.name}>\n")
    lines = f"{head} {_value(tool, parameter.name, parameter.schema, texts)}"
    return lines if parameter.is_required else f"({lines})?"


def _value(tool: Tool, place: str, schema: Mapping[str, Any], texts: dict[str, str]) -> str:
    """An expression for a value and the mark after it; `texts` has the rules for text."""
    if types_of(schema, schema) not in (TEXT, ANYTHING):
        return f"{json_value(schema)} {quoted(f'{LINE}{END_PARAMETER}{LINE}')}"
    try:
        terminal = text_terminal(schema, schema)
    except ValueError as error:
        raise ValueError(
            f"the tool parser 'qwen3_coder' cannot call {tool.name!r}: {place!r}: {error}"
        ) from None
    return f"{texts.setdefault(terminal, f'text_{len(texts)}')} {quoted(LINE)}"


def _read_value(source: Source, types: frozenset[str]) -> Reading:
    """Read a value and the mark after it."""
    if types in (TEXT, ANYTHING):
        return (yield from _read_text(source))
    begin = source.at
    yield from source.skip_space()
    if not (yield from source.has_more()):
        return False
    if "string" not in types and source.text[source.at] in "{[":
        found = yield from read_value(source)
        yield from source.skip_space()
        return found and (yield from source.skip(END_PARAMETER))
    value = yield from _read_literal(source)
    if value is None or ("string" in types and type_of(value) not in types):
        source.at = begin
        return (yield from _read_text(source))
    yield Part(arguments=value)
    return True


def _read_text(source: Source) -> Reading:
    """Read text up to the mark, without the line breaks at both of its ends."""
    yield Part(arguments='"')
    yield from source.skip("\n")
    while True:
        begin, place = source.at, source.find(END_PARAMETER)
        source.at = place
        is_end = source.text.startswith(END_PARAMETER, place)
        if source.text.endswith("\n", begin, place) and (is_end or not source.ended):
            source.at -= 1
        if source.at > begin:
            yield Part(arguments=in_json(source.text[begin : source.at]))
        if is_end:
            source.at = place + len(END_PARAMETER)
            yield Part(arguments='"')
            return True
        if source.ended:
            return False
        yield None


def _read_literal(source: Source) -> Generator[None, None, str | None]:
    """The JSON of a literal with the mark after it; None if there is none."""
    pieces = list[str]()

    def collect(reading: Reading) -> Steps:
        while True:
            try:
                part = next(reading)
            except StopIteration as stop:
                found: bool = stop.value
                return found
            if part is None:
                yield
            else:
                pieces.append(part.arguments)

    found = yield from collect(read_value(source))
    yield from source.skip_space()
    found = found and (yield from source.skip(END_PARAMETER))
    return "".join(pieces) if found else None
