"""Llama 3: `{"name": ..., "parameters": {...}}`, several of them separated by `;`."""

from collections.abc import Callable, Sequence

from nanovllm.chat.tool_formats.base import WHOLE, Reading, ToolFormat
from nanovllm.chat.tool_formats.json_reader import read_call
from nanovllm.chat.tool_formats.lark import any_of, arguments_rule, quoted, repeated
from nanovllm.chat.tool_formats.source import Source
from nanovllm.chat.tools import Tool

TAG = "<|python_tag|>"


class Llama3Json(ToolFormat):
    """Calls are at the start of the answer, or after `<|python_tag|>`.

    The arguments may be called `parameters` or `arguments`.
    """

    marker = TAG
    first = "{"
    markers = (TAG,)

    def read(self, source: Source, tools: Sequence[Tool]) -> Reading:  # noqa: ARG002
        """Read calls as long as they follow each other."""
        yield from source.skip(TAG)
        yield from source.skip_space()
        while (yield from read_call(source, ("parameters", "arguments"))):
            yield WHOLE
            yield from source.skip_space()
            yield from source.skip(";")
            yield from source.skip_space()
        return True

    def grammar(
        self,
        tools: Sequence[Tool],
        several: bool,
        literal: Callable[[str], str],  # noqa: ARG002
    ) -> list[str]:
        """Calls without the tag, separated by `; `."""
        rules = [repeated("calls", "call", quoted("; "), several), any_of("call", len(tools))]
        for index, tool in enumerate(tools):
            head = quoted(f'{{"name": {quoted(tool.name)}, "parameters": ')
            rules.append(f"call_{index}: {head} arguments_{index} {quoted('}')}")
            rules.append(arguments_rule(f"arguments_{index}", tool))
        return rules
