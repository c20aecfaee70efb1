"""Tool calls in answers: what is a call, what stays content, and that cuts change nothing."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.openai.tool_formats.parser import ToolParser, join, parse
from nanovllm.openai.tool_formats.table import FORMATS
from nanovllm.openai.tools import Tool

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": ["string", "array"]},
    },
    "required": ["a"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [
    Tool(
        "f", {**SCHEMA, "properties": {**SCHEMA["properties"], "c": {"type": ["string", "array"]}}}
    ),
    Tool("g", {}),
]
CALLS = [
    ("hermes", 'Hi.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n', "Hi."),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "id": [2, {}], "name": "f"}</tool', ""),
    ("llama3_json", ' {"name": "f", "parameters": {"a": 1}}', ""),
    ("llama3_json", '<|python_tag|>{"name": "f", "arguments": {"a": 1}}; x', "; x"),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', ""),
    ("mistral", 'Hi[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', "Hi"),
    ("mistral_args", '[TOOL_CALLS]f{"a": 1}', ""),
    ("pythonic", " [f(a=1)]", ""),
    ("pythonic", "[ f( a = 1 , ), ]\nSo it is.", "So it is."),
    ("pythonic", "Hi <|python_start|>[f(a=1)] <|python_end|>", "Hi"),
    (
        "qwen3_coder",
        "Hi.\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "Hi.",
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a> 1 </parameter></function></tool",
        "",
    ),
]
CONTENT = [
    ("hermes", "<tool_call>no</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}'),
    ("hermes", '<tool_call>{"name": "f"}</tool_call> \n'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("llama3_json", '{"name": "Bob", "age": 3}'),
    ("llama3_json", 'It is {"name": "f", "parameters": {}}'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, oh'),
    ("mistral", "[TOOL_CALLS]"),
    ("pythonic", "[1] is a source, [f(x)] and [f(1)] are others"),
    ("pythonic", "[]"),
    ("pythonic", "[f(a=b)]"),
    ("pythonic", "[f(a=1, a=2)]"),
    ("pythonic", "[f(a=1) f(a=1)]"),
    ("pythonic", "[f(a=1)"),
    ("pythonic", "[f(a={1: 2})]"),
    ("pythonic", "It is [f(a=1)]"),
    ("qwen3_coder", "<tool_call>f</tool_call>"),
    ("qwen3_coder", "<tool_call><function=></function></tool_call>"),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</function></tool_call>"),
    ("qwen3_coder", "<tool_call><function=f></function>x"),
]


@pytest.mark.parametrize(("name", "text", "content"), CALLS)
def test_a_call_is_found(name: str, text: str, content: str) -> None:
    found, (call,) = parse(FORMATS[name], TOOLS, text)
    assert (found, call.name, json.loads(call.arguments)) == (content, "f", {"a": 1})
    assert call.call_id


@pytest.mark.parametrize(("name", "text"), CONTENT)
def test_what_is_no_call_stays_content(name: str, text: str) -> None:
    assert parse(FORMATS[name], TOOLS, text) == (text, [])


def answer(name: str, pieces: list[str], early: bool) -> object:
    parser = ToolParser(FORMATS[name], TOOLS, early)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    content, calls = join([*deltas, *parser.finish()])
    return content, [(call.name, call.arguments) for call in calls]


TOKENS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "f", ',
    '"arguments": ', '"parameters": ', '{"a": "\\u00e9\\n<tool"}', "{}", "[", "]", "}", "{", ",",
    ";", " ", "\n", "x", '"', "\\", "1e5", "-", "é", "<|python_start|>", "<|python_end|>", "[f(", "a=",
    ")", ")]", "'", "'\\x41\\u00e9'", "None", "<function=f>", "</function>", "<parameter=a>",
    "<parameter=b>", "<parameter=c>", "</parameter>", "\n</parameter>\n",
]  # fmt: skip
WELL_FORMED = [text for _, text, _ in CALLS]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(list(FORMATS)),
    st.lists(st.sampled_from([*TOKENS, *WELL_FORMED]), max_size=12).map("".join),
    st.data(),
    st.booleans(),
)
def test_cuts_change_nothing(name: str, text: str, data: st.DataObject, early: bool) -> None:
    whole = answer(name, [text], early)
    assert answer(name, list(text), early) == whole
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    places = zip([0, *cuts], [*cuts, len(text)], strict=True)
    assert answer(name, [text[i:j] for i, j in places], early) == whole


def test_arguments_are_streamed_early() -> None:
    parser = ToolParser(FORMATS["hermes"], TOOLS, early=True)
    text = '<tool_call>{"name": "f", "arguments": {"a": "long text"'
    pieces = [d.arguments for char in text for d in parser.feed(char) if d.arguments]
    assert "".join(pieces) == '{"a": "long text"'
    assert len(pieces) > 10
