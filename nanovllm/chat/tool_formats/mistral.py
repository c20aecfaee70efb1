"""Mistral: `[TOOL_CALLS]` before a JSON list of calls, or before each `name[ARGS]{...}`."""

import re
from collections.abc import Callable, Sequence

from nanovllm.chat.tool_formats.base import WHOLE, Part, Reading, ToolFormat, short_id
from nanovllm.chat.tool_formats.json_reader import read_arguments, read_call
from nanovllm.chat.tool_formats.lark import any_of, arguments_rule, quoted, repeated
from nanovllm.chat.tool_formats.source import Source
from nanovllm.chat.tools import Tool

START, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAME = re.compile(r"[A-Za-z0-9_.-]*")


class Mistral(ToolFormat):
    """The list of older models. Both ways of writing calls are read, whatever the template."""

    marker = START
    markers = (START, CALL_ID, ARGUMENTS)

    def read(self, source: Source, tools: Sequence[Tool]) -> Reading:  # noqa: ARG002
        """Read a list of calls, or a call of the newer form."""
        yield from source.skip(START)
        yield from source.skip_space()
        if (yield from source.skip("[")):
            return (yield from self._read_list(source))
        name = yield from source.skip_all(NAME)
        call_id = ""
        if (yield from source.skip(CALL_ID)):
            call_id = yield from source.skip_all(NAME)
        yield from source.skip(ARGUMENTS)
        yield from source.skip_space()
        if not name or not (yield from source.has_more()) or source.text[source.at] != "{":
            return False
        yield Part(name=name, call_id=call_id)
        if (yield from read_arguments(source)):
            yield WHOLE
        return True

    def _read_list(self, source: Source) -> Reading:
        """Read a list after its opening bracket."""
        while True:
            yield from source.skip_space()
            if not (yield from read_call(source, ("arguments",))):
                return False
            yield from source.skip_space()
            if (yield from source.skip("]")):
                yield WHOLE
                return True
            if not (yield from source.skip(",")):
                return False

    def grammar(
        self, tools: Sequence[Tool], several: bool, literal: Callable[[str], str]
    ) -> list[str]:
        """A list of calls."""
        rules = [
            f"calls: {literal(START)} {quoted('[')} list {quoted(']')}",
            repeated("list", "call", quoted(", "), several),
            any_of("call", len(tools)),
        ]
        for index, tool in enumerate(tools):
            head = quoted(f'{{"name": {quoted(tool.name)}, "arguments": ')
            rules.append(f"call_{index}: {head} arguments_{index} {quoted('}')}")
            rules.append(arguments_rule(f"arguments_{index}", tool))
        return rules

    def new_id(self) -> str:
        """Nine letters or digits: Mistral's templates refuse other ids."""
        return short_id()


class MistralArgs(Mistral):
    """The newer form, `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    def grammar(
        self, tools: Sequence[Tool], several: bool, literal: Callable[[str], str]
    ) -> list[str]:
        """A mark before each call."""
        for tool in tools:
            if not NAME.fullmatch(tool.name):
                raise ValueError(
                    f"the tool parser 'mistral_args' cannot call {tool.name!r}: names are made of"
                    " letters, digits and ._-"
                )
        rules = [repeated("calls", "call", "", several), any_of("call", len(tools))]
        for index, tool in enumerate(tools):
            head = f"{literal(START)} {quoted(tool.name)} {literal(ARGUMENTS)}"
            rules.append(f"call_{index}: {head} arguments_{index}")
            rules.append(arguments_rule(f"arguments_{index}", tool))
        return rules
