"""Chats with tools and reasoning: what is constrained, how answers are read, what is refused."""

import json
import re
from typing import Any

import jsonschema
import pytest
import torch
from conftest import byte_tokenizer, make_model
from reference import make_llm
from transformers import AddedToken

from nanovllm import LLM, SamplingParams, StructuredOutputs
from nanovllm.chat.tool_formats.table import FORMATS
from nanovllm.chat.tools import described_tools, tool_choice_of
from nanovllm.config import TOOL_PARSERS

pytestmark = pytest.mark.usefixtures("one_thread")

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["é", 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}},
    {"type": "function", "function": {"name": "no.thing"}},
]
SCHEMAS = {"add": ADD, "no.thing": {"type": "object", "maxProperties": 0}}
NAMED = {"type": "function", "function": {"name": "no.thing"}}
HI = [{"role": "user", "content": "Hi"}]
BODY = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
SHOWN = "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
HERMES = f"{SHOWN}<tool_call>{BODY}"
THINKING = f"{HERMES}{{% if enable_thinking is false %}}<think></think>\n\n{{% endif %}}"
SIGNS = {
    "hermes": "<tool_call>", "llama3_json": "<|python_tag|>", "mistral": "[TOOL_CALLS]",
    "mistral_args": "[TOOL_CALLS][ARGS]", "pythonic": "[func_name1(a=1)]",
    "qwen3_coder": "<tool_call><function=f>",
}  # fmt: skip
MARKERS = (
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<|python_start|>", "<|python_end|>",
)  # fmt: skip
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 5}}\n</tool_call>'


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Random weights, bytes as tokens, and no added tokens: markers are written by letters."""
    return make_llm(make_model(tmp_path_factory.mktemp("plain"), max_position_embeddings=2048))


@pytest.fixture(scope="module", params=[False, True], ids=["tokens", "special tokens"])
def marked(request: Any, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The same with the markers as tokens of their own."""
    path = tmp_path_factory.mktemp("marked")
    tokenizer = byte_tokenizer()
    tokens = [AddedToken(marker, special=request.param) for marker in (*MARKERS, "</think>")]
    tokenizer.add_tokens(tokens, special_tokens=request.param)
    make_model(path, max_position_embeddings=2048, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(path)
    return make_llm(path)


def ask(llm: LLM, seed: int = 0, template: str = HERMES, **options: Any) -> Any:
    params = SamplingParams(temperature=4.0, seed=seed, max_tokens=options.pop("max_tokens", 300))
    asked = options.pop("structured_outputs", None)
    if asked is not None:
        params = SamplingParams(max_tokens=300, structured_outputs=asked)
    (output,) = llm.chat(HI, params, use_tqdm=False, chat_template=template, **options)
    return output


def calls_of(output: Any) -> list[tuple[str, Any]]:
    """The calls of an answer by name, with arguments that fit their schemas."""
    calls = []
    for call in output.message["tool_calls"]:
        assert call["type"] == "function" and call["id"]
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, SCHEMAS[name])
        calls.append((name, arguments))
    return calls


@pytest.mark.parametrize("sign", SIGNS)
def test_required_calls_fit_their_schemas(marked: LLM, sign: str) -> None:
    """Weights are random: without the constraint there would be no call."""
    found = set()
    for seed in range(6):
        output = ask(
            marked, seed, SHOWN + SIGNS[sign] + BODY,
            tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
        )  # fmt: skip
        assert output.message["content"] is None and output.finish_reason == "stop"
        found |= {name for name, _ in calls_of(output)}
    assert found == {"add", "no.thing"}


def test_every_format_has_a_name_in_the_options() -> None:
    assert {*FORMATS, "harmony", "none"} == set(TOOL_PARSERS)


def test_required_calls_without_marker_tokens(llm: LLM) -> None:
    outputs = [ask(llm, seed, tools=TOOLS, tool_choice="required") for seed in range(6)]
    assert {name for output in outputs for name, _ in calls_of(output)} == {"add", "no.thing"}


def test_a_marker_token_is_the_only_way_to_begin(marked: LLM) -> None:
    output = ask(marked, tools=TOOLS, tool_choice="required")
    assert output.token_ids[0] == marked.tokenizer.convert_tokens_to_ids("<tool_call>")


def test_a_named_function_is_called_once(llm: LLM) -> None:
    for seed in range(3):
        output = ask(llm, seed, tools=TOOLS, tool_choice=NAMED)
        assert calls_of(output) == [("no.thing", {})]


@pytest.mark.parametrize("several", [None, True, False])
def test_parallel_calls(llm: LLM, several: bool | None) -> None:
    """A bias makes the model go on where it may."""
    params = SamplingParams(temperature=1.5, max_tokens=200, logit_bias={257: -100.0}, seed=1)
    options: Any = dict(tools=TOOLS, tool_choice="required", parallel_tool_calls=several)
    (out,) = llm.chat(HI, params, use_tqdm=False, chat_template=HERMES, **options)
    assert (len(out.message["tool_calls"]) > 1) == (several is not False)


def test_calls_that_the_model_decides_on_are_read(llm: LLM) -> None:
    output = ask(llm, tools=TOOLS, structured_outputs=dict(choice=[f"Well.\n{CALL}"]))
    assert output.text == f"Well.\n{CALL}", "the text stays as it is"
    assert output.message["content"] == "Well." and calls_of(output) == [("add", {"a": 5})]
    assert output.outputs[0].message is output.message


def test_tools_that_must_not_be_called(llm: LLM) -> None:
    """They are not shown either, so that the model does not try."""
    output = ask(llm, tools=TOOLS, tool_choice="none", structured_outputs=dict(choice=[CALL]))
    assert output.message == {"role": "assistant", "content": CALL}
    assert "add" not in output.prompt and "add" in ask(llm, tools=TOOLS, max_tokens=1).prompt


@pytest.mark.parametrize("marker_tokens", [False, True])
def test_strict_tools_keep_their_schemas_where_the_model_decides(
    llm: LLM, marked: LLM, marker_tokens: bool
) -> None:
    """Text is free, but behind a marker a call of the schema must follow."""
    model = marked if marker_tokens else llm
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    start = model.tokenizer.encode("<tool_call>", add_special_tokens=False)[0]
    calls, texts = 0, 0
    for seed in range(8):
        params = SamplingParams(
            temperature=1.0, seed=seed, max_tokens=300, logit_bias={start: 6.0, 257: 4.0}
        )
        (out,) = model.chat(HI, params, use_tqdm=False, tools=tools, chat_template=HERMES)
        if "tool_calls" in out.message:
            calls += len(calls_of(out))
        elif out.finish_reason == "stop":
            texts += 1
            assert "<tool_call>" not in out.text
    assert calls if marker_tokens else texts


def test_a_marker_that_is_spelled_begins_no_call(marked: LLM) -> None:
    """Ordinary tokens may write the marker's text, which the reader takes for a marker."""
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    options: Any = dict(tools=tools, chat_template=HERMES)
    (turn,) = marked.chat_turns(HI, SamplingParams(max_tokens=300), **options)
    constraint = marked.intake.accept(turn.prompt, turn.params).constraint
    assert constraint is not None
    matcher = constraint._start.deep_copy()
    spelled = [marked.tokenizer.convert_tokens_to_ids(c) for c in "Hi<tool_call>"]
    assert matcher.try_consume_tokens(spelled) == len(spelled) - 1


def test_only_one_call_where_the_model_decides(marked: LLM) -> None:
    start = marked.tokenizer.convert_tokens_to_ids("<tool_call>")
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=300, logit_bias={start: 20.0})
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    (out,) = marked.chat(
        HI, params, use_tqdm=False, tools=tools, parallel_tool_calls=False, chat_template=HERMES
    )
    assert len(out.message["tool_calls"]) == 1 and out.finish_reason == "stop"


def test_an_answer_is_calls_or_json(marked: LLM) -> None:
    """`response_format` beside tools: what is no call is of the schema."""
    schema = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
              "additionalProperties": False}  # fmt: skip
    wanted = StructuredOutputs(json=schema, disable_any_whitespace=True)
    start = marked.tokenizer.convert_tokens_to_ids("<tool_call>")
    seen = set()
    for bias in (-50.0, 50.0):
        params = SamplingParams(max_tokens=300, structured_outputs=wanted, logit_bias={start: bias})
        (out,) = marked.chat(HI, params, use_tqdm=False, tools=TOOLS, chat_template=HERMES)
        if "tool_calls" in out.message:
            seen.add("calls" if calls_of(out) else "none")
        else:
            jsonschema.validate(json.loads(out.message["content"]), schema)
            seen.add("json")
    assert seen == {"calls", "json"}


def test_reasoning_comes_before_a_constraint(marked: LLM) -> None:
    """The template has `enable_thinking`: the model thinks first, unless that is off."""
    end = marked.tokenizer.convert_tokens_to_ids("</think>")
    params = SamplingParams(
        temperature=1.5, max_tokens=300, seed=3, logit_bias={end: 3.0},
        structured_outputs=dict(regex="(yes|no)"),
    )  # fmt: skip
    options: Any = dict(use_tqdm=False, chat_template=THINKING)
    (out,) = marked.chat(HI, params, **options)
    assert re.search("</think>(yes|no)$", out.text), "with a bias for the marker"
    assert out.message["content"] in ("yes", "no") and out.message["reasoning_content"]
    (out,) = marked.chat(HI, params, enable_thinking=False, **options)
    assert out.text in ("yes", "no") and out.message["content"] == out.text


def test_reasoning_is_apart_from_content_and_calls(llm: LLM) -> None:
    text = f"<think>\nHm.\n</think>\n\nWell. {CALL}"
    asked = dict(choice=[text], after=None)
    output = ask(
        llm, template=THINKING, tools=TOOLS, structured_outputs=asked, enable_thinking=False
    )
    assert output.message["reasoning_content"] == "Hm." and output.message["content"] == "Well."
    assert calls_of(output) == [("add", {"a": 5})]
    plain = ask(llm, structured_outputs=asked)
    assert plain.message == {"role": "assistant", "content": text}, "no reasoning in the template"


def test_a_salt_is_for_the_cache_and_not_for_the_template(llm: LLM) -> None:
    turns = [llm.chat_turns(HI, chat_template=HERMES, cache_salt=salt)[0] for salt in ("a", None)]
    assert [turn.prompt.get("cache_salt") for turn in turns] == ["a", None]
    assert turns[0].prompt["prompt"] == turns[1].prompt["prompt"]


def test_streamed_deltas_join_to_the_message(llm: LLM) -> None:
    text = f"<think>\nHm.\n</think>\n\nWell.\n{CALL}\n{CALL}"
    params = SamplingParams(max_tokens=400, n=2, structured_outputs=dict(choice=[text]))
    options: Any = dict(tools=TOOLS, chat_template=THINKING, enable_thinking=False)
    parts: list[list[Any]] = [[], []]
    for event in llm.stream_chat(HI, params, **options):
        parts[event.sample].append(event.delta)
    (output,) = llm.chat(HI, params, use_tqdm=False, **options)
    message = output.message
    assert message is not None
    for deltas in parts:
        content = "".join(delta.get("content", "") for delta in deltas)
        reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
        assert (reasoning, content) == (message["reasoning_content"], message["content"])
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        for index, expected in enumerate(message["tool_calls"]):
            pieces = [call for call in calls if call["index"] == index]
            assert pieces[0]["id"] and pieces[0]["function"]["name"] == "add"
            written = "".join(call["function"]["arguments"] for call in pieces)
            assert written == expected["function"]["arguments"]


def test_arguments_in_a_conversation_become_objects(llm: LLM) -> None:
    """OpenAI's API has them as text, templates write them as JSON."""
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}"
        "{{ c.function.arguments | tojson }}{% endfor %}{{ m.content or '' }};{% endfor %}"
    )
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 5}'}}
    empty = {**call, "function": {"name": "f", "arguments": ""}}
    talk = [
        *HI, {"role": "assistant", "content": None, "tool_calls": [call, empty]},
        {"role": "tool", "tool_call_id": "x", "content": "10"},
    ]  # fmt: skip
    (turn,) = llm.chat_turns(talk, chat_template=template)
    assert turn.prompt["prompt"] == 'Hi;5{"a": 5}{};10;'
    call["function"]["arguments"] = '{"a": '
    with pytest.raises(
        ValueError, match=re.escape("messages[1].tool_calls[0].function.arguments is not valid")
    ):
        llm.chat_turns(talk, chat_template=template)


def test_python_functions_are_tools() -> None:
    def add(a: int, b: int = 0) -> int:
        """Add two numbers.

        Args:
            a: the first one
            b: the second one
        """
        return a + b

    choice = tool_choice_of(described_tools([add]), "required")
    (tool,) = choice.tools
    assert tool.name == "add" and tool.parameters["required"] == ["a"]
    with pytest.raises(ValueError, match=r"tools\[0\]: Cannot generate"):
        described_tools([lambda a: a])


def function(**fields: Any) -> list[Any]:
    return [{"type": "function", "function": fields}]


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (dict(tools=5), TypeError, "tools must be a list of tools, got 5"),
    (dict(tools=["f"]), TypeError, "tools[0] must be {"),
    (dict(tools=[{"type": "x", "function": {}}]), ValueError, "must be 'function', got 'x'"),
    (dict(tools=function(name="a b")), ValueError, "tools[0].function.name must be 1 to 128 lette"),
    (dict(tools=function(name="a", paramters={})), ValueError, "did you mean 'parameters'?"),
    (dict(tools=function(name="a", parameters=[1])), TypeError, "parameters must be a JSON schema"),
    (dict(tools=function(name="a", parameters={"type": "string"})), ValueError, "got 'string'"),
    (dict(tools=function(name="a", strict=1)), TypeError, "strict must be True or False, got 1"),
    (dict(tools=function(name="a") * 2), ValueError, "the name 'a' occurs 2 times"),
    (dict(tools=TOOLS, tool_choice="any"), ValueError, "'required' or {"),
    (dict(tools=TOOLS, tool_choice=5), ValueError, "tool_choice must be"),
    (
        dict(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "ad"}}),
        ValueError, "there is no tool 'ad'; did you mean 'add'?",
    ),
    (dict(tool_choice="required"), ValueError, "but there are no tools"),
    (dict(tools=TOOLS, parallel_tool_calls="no"), TypeError, "parallel_tool_calls must be True"),
    (
        dict(tools=function(name="a", parameters={"not": {}}), tool_choice="required"),
        ValueError, 'the parameters of the tool \'a\': Unimplemented keys: ["not"] (at #/not)',
    ),
    (
        dict(tools=function(name="a", parameters={"minimun": 1}), tool_choice="required"),
        ValueError, "the parameters of the tool 'a': #: JSON Schema has no 'minimun'",
    ),
    (dict(tools=TOOLS, tool_choice="auto", chat_template=BODY), ValueError, "knows no tools"),
    (dict(tools=TOOLS, tool_choice="required", chat_template=BODY), ValueError, "knows no tools"),
    (
        dict(tools=TOOLS, tool_choice="auto", chat_template=SHOWN + BODY),
        ValueError, "tool_parser: one of",
    ),
    (
        dict(tools=TOOLS, tool_choice="required", structured_outputs=dict(regex="a")),
        ValueError, "tool_choice must be 'auto' or 'none'",
    ),
]  # fmt: skip


class Name(str):
    """A name that counts how often it is compared."""

    num_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Name.num_compared += 1
        return str.__eq__(self, other)


def test_the_names_of_tools_are_compared_in_linear_work() -> None:
    tools = [function(name=Name(f"tool_{number}"))[0] for number in range(500)]
    Name.num_compared = 0
    assert len(tool_choice_of(tools, "auto").tools) == 500
    assert Name.num_compared <= 2 * len(tools)


def test_an_error_shows_the_first_of_many_tools() -> None:
    tools = [function(name=f"{number:05}" * 20)[0] for number in range(2000)]
    named = {"type": "function", "function": {"name": "weather"}}
    with pytest.raises(ValueError, match=r"there are 00000.* and 1950 more$"):
        tool_choice_of(tools, named)


@pytest.mark.parametrize(("options", "error", "words"), BAD)
def test_bad_tools_are_refused(
    llm: LLM, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    params = SamplingParams(structured_outputs=options.get("structured_outputs"))
    given = {name: value for name, value in options.items() if name != "structured_outputs"}
    with pytest.raises(error) as caught:
        llm.chat(HI, params, use_tqdm=False, **{"chat_template": HERMES, **given})
    assert words in str(caught.value)
    assert llm.is_finished()


def test_tools_of_an_unknown_template_are_only_shown(llm: LLM) -> None:
    """As in vLLM, whose users read the text themselves."""
    asked = dict(choice=[CALL])
    output = ask(llm, template=SHOWN + BODY, tools=TOOLS, structured_outputs=asked)
    assert output.prompt.startswith("add;") and output.message["content"] == CALL


def test_neighbours_are_not_changed(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=30)
    (alone,) = llm.chat(HI, params, use_tqdm=False, chat_template=HERMES)
    asked = SamplingParams(seed=6, max_tokens=200, structured_outputs=dict(json_object=True))
    both = llm.chat([HI, HI], [params, asked], use_tqdm=False, chat_template=HERMES)
    assert torch.equal(torch.tensor(both[0].token_ids), torch.tensor(alone.token_ids))
