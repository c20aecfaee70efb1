"""A server of a model that writes harmony, with OpenAI's client."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from servers import Server, serving
from waiting import LIMIT

from tests.chat.harmony_words import IDS, make_harmony_model

HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"], "additionalProperties": False,
}  # fmt: skip
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
# Weights are random: biases let the model think first, and then end its messages.
BIAS = {"<|end|>": 5.0, "<|channel|>": 9.0}
ASKED: Any = dict(
    model="tiny", messages=HI, max_tokens=900, seed=1, temperature=1.0, frequency_penalty=2.0,
    logit_bias={**{str(IDS[text]): bias for text, bias in BIAS.items()}, str(ord("a")): 8.0},
)  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    path = make_harmony_model(tmp_path_factory.mktemp("harmony"))
    with serving(path / "log", str(path), "--served-model-name", "tiny") as server:
        yield client_of(server)


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", timeout=LIMIT, max_retries=0)


def test_calls_with_reasoning_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: Any = {**ASKED, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    reasoned = set()
    for seed in range(6):
        (whole,) = client.chat.completions.create(**{**asked, "seed": seed}).choices
        assert whole.finish_reason == "tool_calls"
        (call,) = whole.message.tool_calls or ()
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        parts = {"reasoning_content": "", "content": "", "name": "", "arguments": ""}
        for chunk in client.chat.completions.create(**{**asked, "seed": seed}, stream=True):
            (choice,) = chunk.choices
            delta = choice.delta.to_dict()
            for one in delta.get("tool_calls", ()):  # type: ignore[attr-defined]
                delta |= one["function"]
            for name in parts:
                parts[name] += str(delta.get(name) or "")
        assert choice.finish_reason == "tool_calls"
        message: dict[str, Any] = whole.message.to_dict()
        assert parts == {
            "reasoning_content": message.get("reasoning_content", ""),
            "content": message["content"] or "",
            "name": "f",
            "arguments": call.function.arguments,
        }
        reasoned.add("reasoning_content" in message)
        assert "<|" not in str(message)
    assert True in reasoned
    talk = [*HI, message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    again = client.chat.completions.create(**{**asked, "messages": talk, "tool_choice": "none"})
    assert again.choices[0].message.tool_calls is None


def test_reasoning_in_responses(client: openai.OpenAI) -> None:
    """Whole, streamed, and sent back: the model sees the same conversation as in a chat."""
    names = ("model", "temperature")
    extra = {name: value for name, value in ASKED.items() if name not in (*names, "messages")}
    extra["max_output_tokens"] = extra.pop("max_tokens")
    tools: Any = [{"type": "function", **TOOLS[0]["function"]}]
    asked: Any = {**{name: ASKED[name] for name in names}, "input": "Hi", "tools": tools}
    asked |= dict(tool_choice="required", parallel_tool_calls=False)
    reasoned = set()
    for seed in range(4):
        own = {"extra_body": {**extra, "seed": seed}}
        whole = client.responses.create(**asked, **own)
        *_, last = client.responses.create(**asked, **own, stream=True)
        assert last.type == "response.completed"
        kinds = [item.type for item in whole.output]
        assert kinds == [item.type for item in last.response.output]
        texts = [
            [item.content[0].text for item in response.output if item.type == "reasoning"]
            for response in (whole, last.response)
        ]
        assert texts[0] == texts[1] and whole.usage and last.response.usage
        number = whole.usage.output_tokens_details.reasoning_tokens
        assert number == last.response.usage.output_tokens_details.reasoning_tokens
        assert (number > 0) == bool(texts[0])
        reasoned.add(kinds[0])
        if kinds != ["reasoning", "function_call"]:
            continue
        call = whole.output[1]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}  # type: ignore[union-attr]
        more: Any = dict(model="tiny", tools=tools, max_output_tokens=1)
        kept = client.responses.create(**more, input=[result], previous_response_id=whole.id)
        function = {"name": "f", "arguments": call.arguments}  # type: ignore[union-attr]
        answer = {
            "role": "assistant", "content": None, "reasoning_content": texts[0][0],
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }  # fmt: skip
        talk: Any = [*HI, answer, {"role": "tool", "tool_call_id": "c", "content": "5"}]
        same = client.chat.completions.create(
            model="tiny", messages=talk, tools=TOOLS, max_tokens=1
        )
        assert kept.usage and same.usage
        assert kept.usage.input_tokens == same.usage.prompt_tokens
    assert "reasoning" in reasoned


def test_reasoning_in_messages(client: openai.OpenAI) -> None:
    """As blocks of thinking, whole and streamed."""
    import anthropic

    url = str(client.base_url).removesuffix("/v1/")
    other = anthropic.Anthropic(base_url=url, api_key="-", timeout=LIMIT, max_retries=0)
    names = ("temperature", "frequency_penalty", "logit_bias")
    extra = {name: ASKED[name] for name in names}
    tools: Any = [{"name": "f", "input_schema": SCHEMA}]
    asked: Any = dict(model="tiny", messages=HI, max_tokens=900, tools=tools)
    asked |= dict(
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "adaptive"},
    )
    reasoned = set()
    for seed in range(4):
        own = {"extra_body": {**extra, "seed": seed}}
        whole = other.messages.create(**asked, **own)
        with other.messages.stream(**asked, **own) as stream:
            last = stream.get_final_message()
        thoughts = [
            [block.thinking for block in message.content if block.type == "thinking"]
            for message in (whole, last)
        ]
        assert thoughts[0] == thoughts[1]
        assert whole.stop_reason == last.stop_reason == "tool_use"
        assert whole.content[-1].input == last.content[-1].input  # type: ignore[union-attr]
        reasoned.add(bool(thoughts[0]))
    assert True in reasoned
    with pytest.raises(anthropic.BadRequestError, match="the model always reasons"):
        other.messages.create(**{**asked, "thinking": {"type": "disabled"}})


def test_a_response_format_is_for_the_final_channel(client: openai.OpenAI) -> None:
    described = {"name": "x", "schema": {"enum": ["a", 22]}}
    wanted: Any = {"type": "json_schema", "json_schema": described}
    for seed in range(3):
        asked = {**ASKED, "seed": seed, "response_format": wanted}
        (choice,) = client.chat.completions.create(**asked).choices
        assert choice.message.content in ('"a"', "22")


def test_the_reasoning_effort_is_a_field(client: openai.OpenAI) -> None:
    def prompt_tokens(**fields: Any) -> int:
        asked = {**ASKED, "max_tokens": 1, **fields}
        usage = client.chat.completions.create(**asked).usage
        assert usage is not None
        return usage.prompt_tokens

    assert prompt_tokens(reasoning_effort="low") == prompt_tokens() - len("medium") + len("low")
    with pytest.raises(openai.BadRequestError, match="must be one of 'low', 'medium', 'high'"):
        prompt_tokens(reasoning_effort="minimal")
