"""Llama 3.2 and 4, ToolACE: `[name(key=value, ...), ...]` with literals of Python."""

import re
from collections.abc import Callable, Sequence

from nanovllm.chat.tool_formats.base import WHOLE, Part, Reading, ToolFormat, headed
from nanovllm.chat.tool_formats.lark import KEY, any_of, json_value, quoted, repeated
from nanovllm.chat.tool_formats.literal_reader import in_json, read_value
from nanovllm.chat.tool_formats.parameters import others_of, parameters_of
from nanovllm.chat.tool_formats.source import Source
from nanovllm.chat.tools import Tool

START, END = "<|python_start|>", "<|python_end|>"
NAME = re.compile(r"""[^\s()\[\]{}<>=,'"\\]*""")


class Pythonic(ToolFormat):
    """One list of calls, at the start of the answer or after `<|python_start|>`.

    A grammar writes each value as JSON: strings, numbers, lists and objects are the same in Python,
    and `true`, `false` and `null` are read as well. Arguments come in the order of the properties.
    """

    marker = START
    first = "["
    markers = (START, END)

    def read(self, source: Source, tools: Sequence[Tool]) -> Reading:  # noqa: ARG002
        """Read a list of calls, which count when it is closed."""
        yield from source.skip(START)
        yield from source.skip_space()
        if not (yield from source.skip("[")):
            return False
        yield from source.skip_space()
        while (yield from self._read_call(source)):
            is_more = yield from source.skip_comma()
            if (yield from source.skip("]")):
                yield WHOLE
                yield from source.skip_space()
                if (yield from source.skip(END)):
                    yield WHOLE
                return True
            if not is_more:
                return False
        return False

    def _read_call(self, source: Source) -> Reading:
        name = yield from source.skip_all(NAME)
        if not name or not (yield from source.skip("(")):
            return False
        yield from source.skip_space()
        if (yield from source.skip(")")):
            yield Part(name=name)
            yield Part(arguments="{}")
            return True
        opener = "{"
        while True:
            key = yield from source.skip_all(NAME)
            yield from source.skip_space()
            if not key or not (yield from source.skip("=")):
                return False
            head = [Part(name=name)] if opener == "{" else []
            head.append(Part(arguments=f'{opener}"{in_json(key)}": '))
            opener = ", "
            if not (yield from headed(head, read_value(source))):
                return False
            is_more = yield from source.skip_comma()
            if (yield from source.skip(")")):
                yield Part(arguments="}")
                return True
            if not is_more:
                return False

    def grammar(
        self,
        tools: Sequence[Tool],
        several: bool,
        literal: Callable[[str], str],  # noqa: ARG002
    ) -> list[str]:
        """A list of calls without the marks."""
        rules = [
            f"calls: {quoted('[')} list {quoted(']')}",
            repeated("list", "call", quoted(", "), several),
            any_of("call", len(tools)),
        ]
        for index, tool in enumerate(tools):
            rules += _call_rules(f"_{index}", tool)
        return [*rules, f"KEY: {KEY}"]


def _call_rules(suffix: str, tool: Tool) -> list[str]:
    """Rules for a call of one tool, by the name `call` and the suffix.

    A tail follows each argument, so that every subset of the optional arguments can be written.
    """
    head = quoted(f"{tool.name}(")
    parameters, others = parameters_of("pythonic", tool, NAME), others_of(tool)
    if others is not None:
        pair = f"KEY {quoted('=')} {json_value(others)}"
        return [
            f"call{suffix}: {head} (pair{suffix} ({quoted(', ')} pair{suffix})*)? {quoted(')')}",
            f"pair{suffix}: {pair}",
        ]
    begins, rules, may_begin = list[str](), list[str](), True
    for index, parameter in enumerate(parameters):
        argument = f"{quoted(parameter.name + '=')} {json_value(parameter.schema)}"
        tail = f"tail{suffix}_{index + 1}"
        if may_begin:
            begins.append(f"{argument} {tail}")
        optional = "" if parameter.is_required else "?"
        rules.append(f"tail{suffix}_{index}: ({quoted(', ')} {argument}){optional} {tail}")
        may_begin = may_begin and not parameter.is_required
    if may_begin:
        begins.append('""')
    return [
        f"call{suffix}: {head} ({' | '.join(begins)}) {quoted(')')}",
        *rules[1:],
        f'tail{suffix}_{len(rules)}: ""',
    ]
