"""What a format's grammar makes, its parser reads: exactly the calls, however the text is cut."""

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from selection import examples

from nanovllm.chat.tool_formats.base import ToolFormat
from nanovllm.chat.tool_formats.lark import quoted
from nanovllm.chat.tool_formats.parser import ToolParser, join
from nanovllm.chat.tool_formats.table import FORMATS
from nanovllm.chat.tools import Tool
from nanovllm.structured.grammars import Grammars
from tests.grammar_words import EOS, constrain, words_grammars, words_tokenizer

llguidance = pytest.importorskip("llguidance")
BYTES = llguidance.LLTokenizer("byte")
CLOSERS = [
    b'"', b"}", b"]", b")", b"\n</parameter>", b"</function>", b"\n", b", ", b"1", b"a",
    "é".encode(), "日".encode(), "😀".encode(), b"'", b"\\", b"=", b">",
]  # fmt: skip
MOST_BYTES = 2_000
Answer = tuple[str, list[tuple[str, str]]]


def matcher_of(
    tool_format: ToolFormat, tools: Sequence[Tool], several: bool = True
) -> "llguidance.LLMatcher":
    rules = tool_format.grammar(tools, several, quoted)
    matcher = llguidance.LLMatcher(BYTES, "\n".join(["start: calls", *rules]), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(matcher: "llguidance.LLMatcher", text: str) -> bool:
    """Whether the grammar allows the whole text."""
    data, copy = list(text.encode()), matcher.deep_copy()
    return copy.try_consume_tokens(data) == len(data) and copy.is_accepting()


def walk(matcher: "llguidance.LLMatcher", rng: random.Random) -> str | None:
    """Random allowed bytes, and ever more often those that close something; None if too long."""
    out = bytearray()
    while not matcher.is_stopped() and not (matcher.is_accepting() and rng.random() < 0.6):
        if len(out) > MOST_BYTES:
            return None
        data = None
        if rng.random() < 0.1 + len(out) / 200:
            ways = [c for c in CLOSERS if matcher.deep_copy().try_consume_tokens([*c]) == len(c)]
            data = rng.choice(ways or [None])
        if data is None:
            mask = matcher.compute_bitmask()
            allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
            ascii_only = [byte for byte in allowed if byte < 128]
            data = bytes([rng.choice(ascii_only or allowed)])
        assert matcher.consume_tokens([*data])
        out += data
    return out.decode()


def answer(
    tool_format: ToolFormat, tools: Sequence[Tool], pieces: Sequence[str], early: bool
) -> Answer:
    parser = ToolParser(tool_format, tools, early)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    content, calls = join([*deltas, *parser.finish()])
    return content, [(call.name, call.arguments) for call in calls]


def all_answers(tool_format: ToolFormat, tools: Sequence[Tool], text: str) -> Answer:
    """What the parser makes of a text, which is the same for all cuts, early and late."""
    whole = answer(tool_format, tools, [text], early=False)
    for size in (1, 2, 7):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert answer(tool_format, tools, pieces, early=False) == whole
        assert answer(tool_format, tools, pieces, early=True) == whole
    return whole


TEXTS = st.sampled_from(["a", "ab", "é", "x y", "日本", "1", "null", "True", "[1", "'", "-"])
COUNT = st.integers(0, 3)


def some(keywords: dict[str, st.SearchStrategy[Any]], **always: Any) -> st.SearchStrategy[Any]:
    """A schema with some of the keywords."""
    fixed = {name: st.just(value) for name, value in always.items()}
    return st.fixed_dictionaries(fixed, optional=keywords)


LEAVES = st.one_of(
    some({"minLength": COUNT, "maxLength": st.integers(3, 9)}, type="string"),
    some(
        {"maxLength": st.integers(4, 20)},
        type="string",
    ).flatmap(
        lambda schema: st.sampled_from(
            ["^a", "b$", "^[a-z]{2}$", "é|^x", "^(ab|c)+$", ".", r"\d", r"^\$1\$$"]
        ).map(lambda pattern: {**schema, "pattern": pattern})
    ),
    st.builds(lambda values: {"enum": values}, st.lists(TEXTS, min_size=1, max_size=3)),
    some({"minimum": st.integers(-20, 3), "maximum": st.integers(4, 200)}, type="integer"),
    some({"exclusiveMinimum": st.sampled_from([-1.5, 0])}, type="number"),
    st.just({"type": "boolean"}),
    st.sampled_from([{"const": 5}, {"const": "x"}, {"enum": [1, None, "y"]}, {}, True]),
    st.just({"anyOf": [{"type": "string"}, {"type": "null"}]}),
    st.just({"type": ["string", "integer"]}),
    st.just({"allOf": [{"type": "string"}, {"$ref": "#/$defs/short"}]}),
    st.just({"$ref": "#/$defs/node"}),
    st.just({"$ref": "#/$defs/short"}),
)
DEFINITIONS = {
    "short": {"type": "string", "minLength": 1, "maxLength": 3},
    "node": {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"$ref": "#/$defs/short"}},
        "additionalProperties": False,
    },
}
VALUES = st.recursive(
    LEAVES,
    lambda parts: (
        some({"items": parts, "minItems": COUNT, "maxItems": st.integers(3, 5)}, type="array")
        | some(
            {"properties": st.dictionaries(TEXTS, parts, max_size=2),
             "additionalProperties": parts | st.just(False)},
            type="object",
        )
    ),
    max_leaves=4,
)  # fmt: skip
NAMES = ("f", "get_weather", "a-b", "math.add", "naïve", "f2", "x" * 64)
KEYS = ("a", "b_c", "from", "d-e", "ключ", "q")


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, Any]:
    properties = draw(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    schema = {"type": "object", "properties": properties, "required": required}
    if draw(st.booleans()):
        schema["additionalProperties"] = draw(st.booleans())
    if draw(st.booleans()):
        schema["required"] = [*required, "other"]
        schema["additionalProperties"] = draw(st.just({"type": "integer"}) | st.just(True))
    return {**schema, "$defs": DEFINITIONS}


OPEN = [
    {}, {"type": "object"}, {"additionalProperties": False},
    {"additionalProperties": {"type": "string", "maxLength": 5}},
    {"additionalProperties": {"type": ["integer", "string"]}},
]  # fmt: skip
TOOLS = st.lists(
    st.builds(Tool, st.sampled_from(NAMES), st.sampled_from(OPEN) | parameters()),
    min_size=1,
    max_size=3,
    unique_by=lambda tool: tool.name,
)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(tools=TOOLS, several=st.booleans(), seed=st.integers(0, 2**32))
def test_what_a_grammar_makes_is_read(
    name: str, tools: list[Tool], several: bool, seed: int
) -> None:
    tool_format = FORMATS[name]
    if name == "mistral_args":
        assume(all(tool.name != "naïve" for tool in tools))
    text = walk(matcher_of(tool_format, tools, several), random.Random(seed))
    assume(text is not None)
    content, calls = all_answers(tool_format, tools, text)
    assert content == "", text
    assert calls
    assert several or len(calls) == 1
    by_name = {tool.name: tool.parameters for tool in tools}
    for called, arguments in calls:
        jsonschema.validate(json.loads(arguments), by_name[called])


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(tools=TOOLS, seed=st.integers(0, 2**32))
def test_any_arguments_are_read(name: str, tools: list[Tool], seed: int) -> None:
    """Of tools that are not strict: the grammar knows no schemas, but the parser does."""
    open_tools = [Tool(tool.name.replace("ï", "i"), {"type": "object"}) for tool in tools]
    text = walk(matcher_of(FORMATS[name], open_tools), random.Random(seed))
    assume(text is not None)
    content, calls = all_answers(FORMATS[name], tools, text)
    assert content == "", text
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


ODD = Tool(
    "a-b.c",
    {"properties": {"from": {"type": "string"}, "n": {"type": "integer"}}, "required": ["n"]},
)
ODD_ARGUMENTS = r'{"from": "<|eos|> \"é\"\n", "n": 3}'
CALLS_OF_ODD = {
    "hermes": "\n".join(
        ['<tool_call>\n{"name": "a-b.c", "arguments": ' + ODD_ARGUMENTS + "}\n</tool_call>"] * 2
    ),
    "llama3_json": "; ".join(['{"name": "a-b.c", "parameters": ' + ODD_ARGUMENTS + "}"] * 2),
    "mistral": "[TOOL_CALLS]["
    + ", ".join(['{"name": "a-b.c", "arguments": ' + ODD_ARGUMENTS + "}"] * 2)
    + "]",
    "mistral_args": f"[TOOL_CALLS]a-b.c[ARGS]{ODD_ARGUMENTS}" * 2,
    "pythonic": "[" + ", ".join([r'a-b.c(from="<|eos|> \"é\"\n", n=3)'] * 2) + "]",
    "qwen3_coder": "\n".join(
        ['<tool_call>\n<function=a-b.c>\n<parameter=from>\n<|eos|> "é"\n\n</parameter>\n'
         "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"] * 2
    ),
}  # fmt: skip
MARKERS = sorted({marker for one in FORMATS.values() for marker in one.markers})


@pytest.mark.parametrize("name", FORMATS)
def test_markers_that_are_special_tokens(name: str) -> None:
    """The grammar takes the tokens, not their text, and the parser reads the text of the output."""
    tokenizer = words_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKERS})
    ids = tokenizer.get_added_vocab()
    grammars = Grammars(tokenizer, len(tokenizer), (EOS,))
    rules = FORMATS[name].grammar([ODD], True, lambda text: f"<[{ids[text]}]>")
    constraint = constrain(grammars, grammar="\n".join(["start: calls", *rules]))
    text = CALLS_OF_ODD[name]
    tokens = [
        token
        for piece in re.split(f"({'|'.join(map(re.escape, MARKERS))})", text)
        for token in ([ids[piece]] if piece in ids else piece.encode())
    ]
    matcher = constraint.after(tokens)
    assert matcher is not None
    assert matcher.is_accepting()
    if tokens != list(text.encode()):
        assert constraint.after(list(text.encode())) is None
    assert all_answers(FORMATS[name], [ODD], tokenizer.decode(tokens)) == (
        "",
        [("a-b.c", ODD_ARGUMENTS)] * 2,
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_large_tool_is_no_large_grammar(name: str) -> None:
    """Lines and references are limited: definitions within each parameter would exceed that."""
    node = {"type": "object", "properties": {f"n{i}": {"$ref": "#/$defs/node"} for i in range(40)}}
    properties = {f"p{i}": {"type": "string", "maxLength": 9} for i in range(99)}
    properties["q"] = {"$ref": "#/$defs/node"}
    schema = {"properties": properties, "required": ["p0"], "$defs": {"node": node}}
    tools = [Tool(f"f{i}", schema) for i in range(4)]
    rules = FORMATS[name].grammar(tools, True, quoted)
    constrain(words_grammars(), grammar="\n".join(["start: calls", *rules]))
