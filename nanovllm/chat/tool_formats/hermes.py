"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere."""

from collections.abc import Callable, Sequence

from nanovllm.chat.tool_formats.base import WHOLE, Reading, ToolFormat
from nanovllm.chat.tool_formats.json_reader import read_call
from nanovllm.chat.tool_formats.lark import any_of, arguments_rule, quoted, repeated
from nanovllm.chat.tool_formats.source import Source
from nanovllm.chat.tools import Tool

START, END = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    """Each call is an object between two marks; the end of the answer may replace the last one."""

    marker = START
    markers = (START, END)

    def read(self, source: Source, tools: Sequence[Tool]) -> Reading:  # noqa: ARG002
        """Read one call."""
        yield from source.skip(START)
        yield from source.skip_space()
        if not (yield from read_call(source, ("arguments",))):
            return False
        yield from source.skip_space()
        if (yield from source.skip_last(END)):
            yield WHOLE
        return True

    def grammar(
        self, tools: Sequence[Tool], several: bool, literal: Callable[[str], str]
    ) -> list[str]:
        """Calls on lines of their own, as Qwen's templates show them."""
        start, end = literal(START), literal(END)
        rules = [repeated("calls", "call", quoted("\n"), several), any_of("call", len(tools))]
        for index, tool in enumerate(tools):
            head = quoted(f'\n{{"name": {quoted(tool.name)}, "arguments": ')
            tail = quoted("}\n")
            rules.append(f"call_{index}: {start} {head} arguments_{index} {tail} {end}")
            rules.append(arguments_rule(f"arguments_{index}", tool))
        return rules
