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
