"""Tool calls in answers: what is a call, what stays content, and that cuts change nothing."""

import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.openai.tool_formats.parser import ToolParser, join, parse
from nanovllm.openai.tool_formats.table import FORMATS, shown_format
from nanovllm.openai.tools import Tool

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
CALLS = [
    ("hermes", 'Hi.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n', "Hi."),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "id": [2, {}], "name": "f"}</tool', ""),
    ("llama3_json", ' {"name": "f", "parameters": {"a": 1}}', ""),
    ("llama3_json", '<|python_tag|>{"name": "f", "arguments": {"a": 1}}; x', "; x"),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', ""),
    ("mistral", 'Hi[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', "Hi"),
    ("mistral_args", '[TOOL_CALLS]f{"a": 1}', ""),
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
]


@pytest.mark.parametrize(("name", "text", "content"), CALLS)
def test_a_call_is_found(name: str, text: str, content: str) -> None:
    found, (call,) = parse(FORMATS[name], text)
    assert (found, call.name, json.loads(call.arguments)) == (content, "f", {"a": 1})
    assert call.call_id


@pytest.mark.parametrize(("name", "text"), CONTENT)
def test_what_is_no_call_stays_content(name: str, text: str) -> None:
    assert parse(FORMATS[name], text) == (text, [])


def answer(name: str, pieces: list[str], early: bool) -> object:
    parser = ToolParser(FORMATS[name], early)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    content, calls = join([*deltas, *parser.finish()])
    return content, [(call.name, call.arguments) for call in calls]


TOKENS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "f", ',
    '"arguments": ', '"parameters": ', '{"a": "\\u00e9\\n<tool"}', "{}", "[", "]", "}", "{", ",",
    ";", " ", "\n", "x", '"', "\\", "1e5", "-", "é",
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
    parser = ToolParser(FORMATS["hermes"], early=True)
    text = '<tool_call>{"name": "f", "arguments": {"a": "long text"'
    pieces = [d.arguments for char in text for d in parser.feed(char) if d.arguments]
    assert "".join(pieces) == '{"a": "long text"'
    assert len(pieces) > 10


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("several", [False, True])
def test_what_a_grammar_accepts_is_parsed(name: str, several: bool) -> None:
    """Random walks through the grammar, byte by byte."""
    import random

    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer("byte")
    tools = [Tool("f", SCHEMA), Tool("g", {"type": "object", "properties": {}})]
    rules = FORMATS[name].grammar(tools, several, json.dumps)
    for seed in range(5):
        rng = random.Random(seed)
        matcher = llguidance.LLMatcher(tokenizer, "\n".join(["start: calls", *rules]))
        assert not matcher.is_error(), matcher.get_error()
        out = bytearray()
        while not matcher.is_stopped() and not (matcher.is_accepting() and len(out) > 60):
            mask = matcher.compute_bitmask()
            allowed = [i for i in range(256) if mask[i // 8] >> i % 8 & 1 and i < 128]
            ends = [i for i in allowed if chr(i) in '"}],']
            byte = rng.choice(ends if ends and rng.random() < 0.5 else allowed)
            matcher.consume_token(byte)
            out.append(byte)
        content, calls = parse(FORMATS[name], out.decode())
        assert content == ""
        assert calls
        for call in calls:
            arguments = json.loads(call.arguments)
            jsonschema.validate(arguments, next(t.parameters for t in tools if t.name == call.name))


def test_a_template_shows_its_format() -> None:
    assert shown_format('<tool_call>\n{"name": <function-name>') == "hermes"
    assert shown_format("<tool_call>\n<function=x>") is None
    assert shown_format("[TOOL_CALLS]name[ARGS]") == "mistral_args"
    assert shown_format("[TOOL_CALLS]") == "mistral"
    assert shown_format("<|python_tag|>") == "llama3_json"
    assert shown_format("nothing") is None
