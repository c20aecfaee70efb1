"""Tool calls in answers: what is a call, what stays content, and that cuts change nothing."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from nanovllm.chat.tool_formats import parameters
from nanovllm.chat.tool_formats.parser import MOST_FAILED, ToolParser, join, parse
from nanovllm.chat.tool_formats.qwen3_coder import Qwen3Coder
from nanovllm.chat.tool_formats.table import FORMATS
from nanovllm.chat.tools import Tool
from nanovllm.config import TOOL_PARSERS

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
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\nx",
        "x",
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
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f"}</tool_call> \n'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("llama3_json", '{"name": "Bob", "age": 3}'),
    ("llama3_json", 'It is {"name": "f", "parameters": {}}'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, oh'),
    ("mistral", "[TOOL_CALLS]"),
    ("pythonic", "[1] is a source, [f(x)] and [f(1)] are others"),
    ("pythonic", "[]"),
    ("pythonic", "[f(a=b)]"),
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
    '"arguments": ', '"parameters": ', '{"a": "\\u00e9\\n<tool"}', '{"a": 01}', "{}", "[", "]", "}",
    "{", ",", ";", " ", "\n", "x", '"', "\\", "1e5", "-", "é", "<|python_start|>", "<|python_end|>",
    "[f(", "a=", ")", ")]", "'", "'\\x41\\u00e9'", "None", "<function=f>", "</function>",
    "<parameter=a>", "<parameter=b>", "<parameter=c>", "</parameter>", "\n</parameter>\n",
]  # fmt: skip
WELL_FORMED = [text for _, text, _ in CALLS]


@settings(max_examples=examples(300), deadline=None)
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


# Calls of f around the text of an argument; how many characters may be held back at most.
AROUND = {
    "hermes": ('<tool_call>{"name": "f", "arguments": {"b": "', '"}}</tool_call>', 1),
    "llama3_json": ('{"name": "f", "parameters": {"b": "', '"}}', 1),
    "mistral": ('[TOOL_CALLS][{"name": "f", "arguments": {"b": "', '"}}]', 1),
    "mistral_args": ('[TOOL_CALLS]f[ARGS]{"b": "', '"}', 1),
    "pythonic": ("[f(b='", "')]", 1),
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n<parameter=b>\n",
        "\n</parameter>\n</function>\n</tool_call>",
        len("\n</parameter"),
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_are_streamed_early(name: str) -> None:
    head, tail, most_held = AROUND[name]
    text = "It is a long text </p with more or less < in it. " * 3
    parser = ToolParser(FORMATS[name], TOOLS, early=True)
    deltas = parser.feed(head)
    for place, char in enumerate(text, 1):
        deltas += parser.feed(char)
        ((_, called, arguments),) = join(deltas)[1]
        assert called == "f"
        got = arguments.removeprefix('{"b": "')
        assert got == text[: len(got)]
        assert len(got) >= place - most_held
    deltas += [*parser.feed(tail), *parser.finish()]
    ((_, _, arguments),) = join(deltas)[1]
    assert json.loads(arguments) == {"b": text}


@pytest.mark.parametrize("name", FORMATS)
def test_content_is_not_held_back(name: str) -> None:
    """Except what may begin a marker."""
    parser = ToolParser(FORMATS[name], TOOLS)
    marker = FORMATS[name].marker
    text = f"Is a {marker[:-1]} or {marker[:2]}. No!"
    deltas = []
    for place, char in enumerate(text, 1):
        deltas += parser.feed(char)
        content, _ = join(deltas)
        assert content == text[: len(content)]
        assert len(content) >= place - len(marker)
    assert join(deltas)[0] == text


def test_a_call_is_reported_with_its_last_character() -> None:
    """It does not wait for what follows."""
    for name, (head, tail, _) in AROUND.items():
        parser = ToolParser(FORMATS[name], TOOLS)
        assert parser.feed(f"{head}x{tail[:-1]}") == [], name
        assert join(parser.feed(tail[-1]))[1][0].name == "f", name


def test_a_call_keeps_the_id_that_the_model_wrote() -> None:
    text = '[TOOL_CALLS]f[CALL_ID]abc123xyz[ARGS]{"a": 1}'
    _, (call,) = parse(FORMATS["mistral_args"], TOOLS, text)
    assert call.call_id == "abc123xyz"


def test_the_deltas_of_one_piece_are_joined() -> None:
    parser = ToolParser(FORMATS["pythonic"], TOOLS)
    deltas = parser.feed("[f(a=[1, 2, {'x': None}]), g()]")
    assert [(d.call, d.name, d.arguments) for d in deltas] == [
        (0, "f", ""), (0, "", '{"a": [1, 2, {"x": null}]}'), (1, "g", ""), (1, "", "{}"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("<parameter=b>\n 5 \n\n</parameter>", {"b": " 5 \n"}),
        ("<parameter=b></parameter>", {"b": ""}),
        ("<parameter=b>\n\n</parameter>", {"b": ""}),
        ('<parameter=b>\n"</p>" \\n é\n</parameter>', {"b": '"</p>" \\n é'}),
        ("<parameter=a>\n5\n</parameter>", {"a": 5}),
        ("<parameter=a>\nfive\n</parameter>", {"a": "five"}),
        ("<parameter=c>\nfive\n</parameter>", {"c": "five"}),
        ("<parameter=c>\n5\n</parameter>", {"c": "5"}),
        ('<parameter=c>\n[1, "</parameter>"]\n</parameter>', {"c": [1, "</parameter>"]}),
        ("<parameter=c>\n[1, oh\n</parameter>", {"c": "[1, oh"}),
        ("<parameter=d>\n{'x': True}\n</parameter>", {"d": {"x": True}}),
        ("<parameter=d>\nNone\n</parameter>", {"d": None}),
        ("<parameter=e>\n[1]\n</parameter>", {"e": "[1]"}),
        ("<parameter=other>\n1\n</parameter>", {"other": "1"}),
        ("<parameter=a>1</parameter><parameter=b>2</parameter>", {"a": 1, "b": "2"}),
        ("<parameter=g>\n5\n</parameter>", {"g": 5}),
    ],
)
def test_the_schema_says_how_a_value_is_written(written: str, value: object) -> None:
    number_or_text = {"type": ["number", "string"]}
    properties = {**SCHEMA["properties"], "d": {"$ref": "#/$defs/some"}, "e": {}}
    properties["g"] = number_or_text
    some = {"anyOf": [{"type": "object"}, {"type": "null"}]}
    tool = Tool("f", {"properties": properties, "$defs": {"some": some}})
    text = f"<tool_call>\n<function=f>\n{written}\n</function>\n</tool_call>"
    content, (call,) = parse(FORMATS["qwen3_coder"], [Tool("g", {}), tool], text)
    assert (content, json.loads(call.arguments)) == ("", value)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.sampled_from(list(FORMATS)),
    st.lists(st.sampled_from([*TOKENS, *WELL_FORMED]), max_size=12),
    st.booleans(),
)
def test_nothing_is_lost(name: str, pieces: list[str], early: bool) -> None:
    """Content is a part of the text, in order; without calls it is all of it."""
    text = "".join(pieces)
    content, calls = answer(name, pieces, early)
    rest = iter(text)
    assert all(char in rest for char in content)
    if not calls:
        assert content == text
    if not early:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


def seconds(name: str, pieces: list[str]) -> float:
    """The time for an answer: the least of two."""
    times = []
    for _ in range(2):
        begin = time.thread_time()
        answer(name, pieces, early=False)
        times.append(time.thread_time() - begin)
    return min(times)


@pytest.mark.sampled(share=0.4)
@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_the_time_is_linear_in_the_length(name: str) -> None:
    """A quadratic one would be 256 times as long for 16 times the text."""
    head, tail, _ = AROUND[name]
    marker, first = FORMATS[name].marker, FORMATS[name].first or "["

    def answers(length: int) -> list[list[str]]:
        opened = head.replace('"b": "', '"b": ').replace("='", "=").replace("=b", "=c")
        return [
            [head, *["xxxx"] * (length // 8), tail],
            [" \n"] * (length // 8),
            [marker * (length // len(marker))],
            [first * length],
            [head * (length // len(head))],
            [opened + "[" * length],
        ]

    for short, long in zip(answers(20_000), answers(320_000), strict=True):
        assert seconds(name, long) < 80 * max(seconds(name, short), 0.004), short[:3]


def test_calls_that_fail_look_at_a_bounded_amount_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each marker begins a value that takes all text up to the end, where the call is no call."""
    begun, plain = [], Qwen3Coder.read

    def counted(*args: Any) -> Any:
        begun.append(1)
        return plain(*args)

    monkeypatch.setattr(Qwen3Coder, "read", counted)
    text = "<tool_call><function=f><parameter=b>" * 5000 + "</parameter>x"
    assert answer("qwen3_coder", [text], early=False) == (text, [])
    assert len(begun) * len(text) < MOST_FAILED + 2 * len(text)


def test_the_types_of_a_parameter_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, plain = [], parameters.types_of

    def counted(*args: Any) -> Any:
        found.append(1)
        return plain(*args)

    monkeypatch.setattr(parameters, "types_of", counted)
    tool = Tool("f", SCHEMA)
    pair = "<parameter=a>1</parameter>"
    text = f"<tool_call><function=f>{pair * 50}</function></tool_call>"
    assert parse(FORMATS["qwen3_coder"], [tool], text * 2)[1] and len(found) == 1


@pytest.mark.parametrize("name", FORMATS)
def test_markers_are_made_by_the_caller(name: str) -> None:
    """They may be special tokens, which no other text makes."""
    asked = []

    def literal(text: str) -> str:
        asked.append(text)
        return "<[7]>"

    rules = FORMATS[name].grammar([Tool("f", SCHEMA), Tool("g", {})], True, literal)
    assert set(asked) <= set(FORMATS[name].markers)
    assert not any(marker in rule for marker in FORMATS[name].markers for rule in rules)


def test_the_option_allows_the_formats_that_there_are() -> None:
    assert {*TOOL_PARSERS} == {*FORMATS, "harmony", "none"}


def refusal(name: str, tool: Tool) -> str:
    with pytest.raises(ValueError, match=tool.name) as raised:
        FORMATS[name].grammar([tool], False, json.dumps)
    return str(raised.value)


def test_what_a_grammar_cannot_write_is_refused() -> None:
    def tool(**schema: object) -> Tool:
        return Tool("f", {"type": "object", **schema})

    for name in ("pythonic", "qwen3_coder"):
        assert "'a=<b'" in refusal(name, tool(properties={"a=<b": {}}))
        assert "anyOf" in refusal(name, tool(anyOf=[{"required": ["a"]}]))
        assert "'a' is required" in refusal(name, tool(properties={"a": False}, required=["a"]))
        assert "'f<'" in refusal(name, Tool("f<", {}))
    dated = tool(properties={"a": {"type": "string", "format": "date"}})
    assert "'a': format" in refusal("qwen3_coder", dated)
    assert "'f f'" in refusal("mistral_args", Tool("f f", {}))
