"""Chats in harmony: prompts, constraints of answers by tokens, what is refused."""

import json
import re
from typing import Any

import jsonschema
import pytest
from reference import make_llm

from nanovllm import LLM, SamplingParams, StructuredOutputs
from nanovllm.chat.chat_format import ChatFormat, Turn
from nanovllm.chat.harmony.grammar import HarmonyGrammar
from nanovllm.chat.harmony.turns import uses_harmony
from nanovllm.chat.tools import Tool, ToolChoice
from nanovllm.structured.grammars import Grammars
from tests.chat.harmony_words import (
    ENDS,
    IDS,
    TEMPLATE,
    TOKENIZER,
    answer_of,
    make_harmony_model,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMA = {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"], "additionalProperties": False,
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "f2.x", "description": "Gives x."}},
]
NAMED = {"type": "function", "function": {"name": "f"}}
HI = [{"role": "user", "content": "Hi"}]
A, C, F = (f"<|channel|>{name}<|message|>" for name in ("analysis", "commentary", "final"))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, len(TOKENIZER), ENDS)


def allows(grammars: Grammars, asked: StructuredOutputs | None, answer: str) -> bool:
    """Whether a constraint allows the answer, and its end there."""
    assert asked is not None
    matcher = grammars.constraint(asked).after(tokens_of(answer))
    return matcher is not None and bool(matcher.is_accepting())


def constraint(tools: ToolChoice, place: str = "header", **asked: Any) -> StructuredOutputs | None:
    wanted = StructuredOutputs(**asked) if asked else None
    return HarmonyGrammar(IDS).constraint(tools, wanted, place)


def call(name: str, arguments: str = '{"a": 1}', form: str = " <|constrain|>json") -> str:
    return f"<|channel|>commentary to=functions.{name}{form}<|message|>{arguments}"


@pytest.mark.parametrize("several", [False, True])
def test_required_calls_come_after_free_messages(grammars: Grammars, several: bool) -> None:
    tools = (Tool("f", SCHEMA), Tool("f2.x", {"type": "object"}))
    asked = constraint(ToolChoice(tools, required=True, several=several))
    first = ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}'
    for one in (call("f"), call("f", form=" json"), call("f", form=""), first, call("f2.x", "{}")):
        for answer in (one, answer_of(f"{A}Hm é", f"{C}Wait !<|end|>", one)):
            assert allows(grammars, asked, answer)
    assert allows(grammars, asked, answer_of(first, f"{A}Hm", call("f2.x", "{}"))) == several
    for wrong in (f"{F}x", call("f", "{}"), call("f2"), f"{A}Hm", "", answer_of(f"{A}x", "")):
        assert not allows(grammars, asked, wrong)


def test_strict_calls_or_any_text(grammars: Grammars) -> None:
    asked = constraint(ToolChoice((Tool("f", SCHEMA, strict=True),)))
    for answer in (call("f"), f"{F}Yes", F, answer_of(f"{A}Hm", f"{F}<call> {{")):
        assert allows(grammars, asked, answer)
    for wrong in (call("f", "{}"), "Yes", f"{A}Hm", f"{F}<|start|>"):
        assert not allows(grammars, asked, wrong)
    assert constraint(ToolChoice((Tool("f", SCHEMA),))) is None


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (dict(json={"type": "integer"}), "12", '"a"'),
        (dict(json_object=True), '{"x": [1]}', "12"),
        (dict(json=True, disable_any_whitespace=True), '{"x":1}', '{"x": 1}'),
        (dict(regex="a|b+"), "bb", "ab"),
        (dict(choice=["a", "ab"]), "ab", "b"),
        (dict(grammar='start: "a" B\nB: /b+/'), "abb", "a"),
        (dict(grammar='root ::= "ab"'), "ab", "a"),
        (
            dict(structural_tag={"type": "structural_tag",
                                 "format": {"type": "const_string", "value": "ab"}}),
            "ab", "b",
        ),
    ],
)  # fmt: skip
def test_only_the_final_channel_is_constrained(
    grammars: Grammars, asked: dict[str, Any], good: str, bad: str
) -> None:
    wanted = constraint(ToolChoice(), **asked)
    for before in ([], [f"{A}Hm"], [f"{A}!<|end|>x", f"{A}Hm"]):
        assert allows(grammars, wanted, answer_of(*before, F + good))
        assert not allows(grammars, wanted, answer_of(*before, F + bad))
    is_tag = "structural_tag" in asked  # it has a marker before it, and no grammar of messages
    assert allows(grammars, wanted, answer_of(f"{C}Hm", F + good)) == is_tag, "it is content"
    assert "json" not in next(iter(asked)) or allows(
        grammars, wanted, f"<|channel|>final <|constrain|>json<|message|>{good}"
    )


def test_an_answer_is_calls_or_json(grammars: Grammars) -> None:
    wanted = constraint(ToolChoice((Tool("f", SCHEMA),)), json={"type": "integer"})
    assert allows(grammars, wanted, answer_of(f"{A}Hm", f"{F}12"))
    assert allows(grammars, wanted, call("f")) and not allows(grammars, wanted, call("f", "{}"))
    wanted = constraint(ToolChoice((Tool("f", SCHEMA),)), regex="x")
    assert allows(grammars, wanted, f"{F}x") and not allows(grammars, wanted, call("f"))


def test_a_constraint_begins_where_the_prompt_ends(grammars: Grammars) -> None:
    required = ToolChoice((Tool("f", SCHEMA),), required=True)
    assert allows(grammars, constraint(ToolChoice(), "final", regex="a"), "a")
    for place, begin in (("start", "<|start|>assistant"), ("other", "x<|end|><|start|>assistant")):
        wanted = constraint(ToolChoice(), place, regex="a")
        assert allows(grammars, wanted, f"{begin}{F}a")
        assert not allows(grammars, wanted, f"{F}a")
        assert allows(grammars, constraint(required, place), begin + call("f"))
    for place in ("", "final"):
        with pytest.raises(ValueError, match="inside of a header, or of an answer"):
            constraint(required, place)
    with pytest.raises(ValueError, match="whitespace_pattern"):
        constraint(ToolChoice(), json={}, whitespace_pattern=" ")


def turn_of(
    messages: list[Any],
    params: SamplingParams | None = None,
    parsers: tuple[str | None, str | None] = (None, None),
    **options: Any,
) -> Turn:
    given = params or SamplingParams()
    (turn,) = ChatFormat(TOKENIZER, *parsers, 4096).turns(
        messages, lambda n: [given] * n, **options
    )
    return turn


def prompt_of(messages: list[Any], **options: Any) -> str:
    return str(turn_of(messages, **options).prompt["prompt"])


BEGIN = "<|start|>system<|message|>Reasoning: medium<|end|>"
USER = "<|start|>user<|message|>Hi<|end|>"


def called(*numbers: int, **fields: Any) -> dict[str, Any]:
    calls = [
        {"id": f"id{n}", "type": "function",
         "function": {"name": f"f{n}", "arguments": json.dumps({"n": n})}}
        for n in numbers
    ]  # fmt: skip
    return {"role": "assistant", "content": None, "tool_calls": calls, **fields}


def result(number: int, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"id{number}", "content": f"r{number}", **fields}


def shown(number: int, answered: bool = True) -> str:
    text = f"<|start|>assistant to=functions.f{number}<|channel|>commentary json<|message|>"
    text += f'{{"n": {number}}}<|call|>'
    if answered:
        text += f"<|start|>functions.f{number} to=assistant<|channel|>commentary<|message|>"
        text += f'"r{number}"<|end|>'
    return text


def test_the_template_gets_what_it_reads() -> None:
    tools = [{"type": "function", "function": {
        "name": "f", "parameters": {"properties": {"a": {"type": "integer"}, "b": True}},
    }}]  # fmt: skip
    tools[0]["function"]["parameters"]["properties"]["b"] = {"description": "B"}  # type: ignore[index]
    talk = [
        {"role": "system", "content": "S"}, {"role": "developer", "content": [
            {"type": "text", "text": "D"},
        ]}, *HI,
    ]  # fmt: skip
    text = prompt_of(talk, tools=tools, reasoning_effort="high")
    assert text == (
        "<|start|>system<|message|>Reasoning: high<|end|>"
        f"<|start|>developer<|message|>S\n\nD// \nf// \na// B\nb<|end|>{USER}<|start|>assistant"
    )
    assert "description" not in tools[0]["function"], "the caller's tools are not changed"


def test_analysis_is_shown_between_calls_and_not_after_an_answer() -> None:
    thought = "<|start|>assistant<|channel|>analysis<|message|>Hm<|end|>"
    talk = [*HI, called(1, reasoning_content="Hm"), result(1)]
    assert prompt_of(talk) == f"{BEGIN}{USER}{thought}{shown(1)}<|start|>assistant"
    answer = {"role": "assistant", "content": "Yes", "reasoning_content": "So", "tool_calls": None}
    text = prompt_of([*talk, answer, *HI])
    final = "<|start|>assistant<|channel|>final<|message|>Yes<|end|>"
    assert text == f"{BEGIN}{USER}{shown(1)}{final}{USER}<|start|>assistant"


def test_a_preamble_is_shown_with_the_reasoning() -> None:
    talk = [*HI, called(1, reasoning_content="Hm", content="I look."), result(1)]
    thought = "<|start|>assistant<|channel|>analysis<|message|>Hm\n\nI look.<|end|>"
    assert prompt_of(talk) == f"{BEGIN}{USER}{thought}{shown(1)}<|start|>assistant"


def test_several_calls_are_shown_one_by_one() -> None:
    """The template reads one call of a message, and results after it."""
    thought = "<|start|>assistant<|channel|>analysis<|message|>Hm<|end|>"
    expected = f"{BEGIN}{USER}{thought}{shown(1)}{shown(2)}{shown(3, False)}<|start|>assistant"
    first = called(1, 2, 3, reasoning_content="Hm")
    assert prompt_of([*HI, first, result(2), result(1)]) == expected
    unnamed = [result(n, tool_call_id=None) for n in (1, 2)]
    assert prompt_of([*HI, first, *unnamed]) == expected


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ([*HI, {"role": "system", "content": "S"}], {}, "messages[1]: the chat template shows sys"),
        (
            HI,
            dict(reasoning_effort="none"),
            "reasoning_effort must be one of 'low', 'medium', 'high'",
        ),
        (HI, dict(chat_template_kwargs={"reasoning_effort": "max"}), "reasoning_effort must be"),
        ([*HI, result(1)], {}, "the chat template fails"),
    ],
)
def test_what_the_template_would_drop_is_refused(
    messages: list[Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        prompt_of(messages, **options)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning", "expected"),
    [
        (TEMPLATE, None, None, True), ("plain", None, None, False), (TEMPLATE, "none", None, True),
        (TEMPLATE, None, "none", True), (TEMPLATE, "none", "none", False),
        ("plain", "harmony", None, True), ("plain", "openai", "openai_gptoss", True),
        (TEMPLATE, "hermes", None, False), ("plain", None, "harmony", True),
    ],
)  # fmt: skip
def test_template_and_names_decide(
    template: str, tools: str | None, reasoning: str | None, expected: bool
) -> None:
    assert uses_harmony(template, tools, reasoning) == expected


def test_harmony_is_for_reasoning_and_calls() -> None:
    for names in (("hermes", "harmony"), ("openai", "qwen3")):
        with pytest.raises(ValueError, match="must both be 'harmony', or 'none'"):
            uses_harmony(TEMPLATE, *names)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return make_llm(make_harmony_model(tmp_path_factory.mktemp("harmony")))


class Forced:
    """A logits processor that writes an answer."""

    def __init__(self, answer: str) -> None:
        self.ids = tokens_of(answer)

    def __call__(self, token_ids: list[int], logits: Any) -> Any:
        logits[:] = float("-inf")
        logits[self.ids[len(token_ids)]] = 0.0
        return logits


def forced(answer: str, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=400, logits_processors=[Forced(answer)], **params)


ANSWER = answer_of(f"{A}Hm é!<|end|>", f"{C}I look.", call("f") + "<|call|>")


def test_an_answer_that_the_model_writes_is_read(llm: LLM) -> None:
    params = forced(ANSWER, n=2)
    (out,) = llm.chat(HI, params, use_tqdm=False, tools=TOOLS)
    message = out.message
    assert message is not None and out.finish_reason == "stop"
    assert (message["reasoning_content"], message["content"]) == ("Hm é<|end|>", "I look.")
    (found,) = message["tool_calls"]
    assert found["function"] == {"name": "f", "arguments": '{"a": 1}'} and found["id"]
    assert out.text.startswith(A), "the text stays as it is"
    parts: list[dict[str, str]] = [{}, {}]
    for event in llm.stream_chat(HI, params, tools=TOOLS):
        delta = dict(event.delta)
        for one in delta.pop("tool_calls", ()):
            delta |= {"name": one["function"].get("name", ""), **one["function"]}
        for name, text in delta.items():
            parts[event.sample][name] = parts[event.sample].get(name, "") + text
    for part in parts:
        assert part["reasoning_content"] == "Hm é<|end|>" and part["content"] == "I look."
        assert part["name"] == "f" and part["arguments"] == '{"a": 1}'


def test_an_answer_that_is_cut(llm: LLM) -> None:
    tokens = tokens_of(ANSWER)
    for number, expected in ((6, None), (len(tokens) - 3, None), (30, "Hm é<|end|>")):
        params = SamplingParams(max_tokens=number, logits_processors=[Forced(ANSWER)])
        (out,) = llm.chat(HI, params, use_tqdm=False, tools=TOOLS)
        assert out.finish_reason == "length" and "tool_calls" not in out.message
        assert expected is None or out.message["reasoning_content"] == expected
    (out,) = llm.chat(HI, forced(ANSWER, stop=["look"]), use_tqdm=False, tools=TOOLS)
    assert out.message == {
        "role": "assistant", "content": "I ", "reasoning_content": "Hm é<|end|>",
    }  # fmt: skip


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_required_calls_fit_their_schemas(llm: LLM, choice: Any) -> None:
    """Weights are random: without the constraint there would be no call. Biases end messages."""
    bias = {IDS["<|end|>"]: 12.0, **dict.fromkeys(ENDS, 12.0)}
    for seed in range(3):
        params = SamplingParams(temperature=2.0, seed=seed, max_tokens=900, logit_bias=bias)
        (out,) = llm.chat(HI, params, use_tqdm=False, tools=TOOLS, tool_choice=choice)
        assert out.finish_reason == "stop"
        for one in out.message["tool_calls"]:
            arguments = json.loads(one["function"]["arguments"])
            if one["function"]["name"] == "f":
                jsonschema.validate(arguments, SCHEMA)
            assert one["function"]["name"] == "f" or (choice == "required" and arguments == {})


def test_a_structured_answer_may_think_first(llm: LLM) -> None:
    """But what it writes in the final channel is what was asked for."""
    wanted = dict(structured_outputs=dict(regex="(yes|no)"))
    for first in ([], [f"{A}Hm"]):
        params = forced(answer_of(*first, f"{F}yes<|return|>"), **wanted)
        (out,) = llm.chat(HI, params, use_tqdm=False)
        assert out.finish_reason == "stop" and out.message["content"] == "yes"
        assert out.message.get("reasoning_content") == ("Hm" if first else None)
    (out,) = llm.chat(HI, forced(f"{F}nah<|return|>", **wanted), use_tqdm=False)
    assert out.finish_reason == "error"
    for seed in range(4):
        bias = {IDS["<|end|>"]: 14.0}
        params = SamplingParams(seed=seed, max_tokens=900, logit_bias=bias, **wanted)  # type: ignore[arg-type]
        (out,) = llm.chat(HI, params, use_tqdm=False)
        assert out.finish_reason == "stop" and re.search(f"{re.escape(F)}(yes|no)$", out.text)


def test_required_calls_need_a_parser() -> None:
    with pytest.raises(ValueError, match="tool_parser='none'"):
        turn_of(HI, parsers=("none", None), tools=TOOLS, tool_choice="required")
    turn = turn_of(HI, parsers=("none", "none"), tools=TOOLS)
    assert turn.answer.harmony is None and turn.params.skip_special_tokens
    asked = SamplingParams(structured_outputs=dict(regex="a"))
    with pytest.raises(ValueError, match="tool_choice must be 'auto' or 'none'"):
        turn_of(HI, asked, tools=TOOLS, tool_choice="required")
