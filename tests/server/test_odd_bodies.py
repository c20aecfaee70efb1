"""Bodies of responses and messages with an odd value in each place: parsed, or a clear error."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest

from nanovllm.openai.request import CHAT, parse_body
from nanovllm.server.messages.request import chat_of, counted_chat
from nanovllm.server.messages.thinking import chat_thinking
from nanovllm.server.responses.request import parse_response, previous_id

ODD: tuple[Any, ...] = (
    None, True, 5, -1, 1.5, 1e400, "x", "", "\ud800", 1 << 70,
    [], {}, [None], [[]], ["x"], [{}], {"type": "x"},
    {"type": []}, {"": 1},
)  # fmt: skip
# What errors say that Python has raised, not a check.
OF_PYTHON = ("NoneType", "object is not", "unhashable", "keyword argument", "has no attribute")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
RESPONSE: dict[str, Any] = {
    "model": "m", "instructions": "a", "max_output_tokens": 5, "temperature": 0.5, "top_p": 0.5,
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}],
         "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "status": "completed", "content": "c"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "e"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto",
                    "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    "metadata": {"a": "b"}, "store": True, "previous_response_id": "p", "seed": 5,
    "reasoning": {"effort": "low"}, "parallel_tool_calls": False, "stream": True,
    "stream_options": {"include_obfuscation": False}, "user": "u", "truncation": "disabled",
    "background": False, "include": [], "top_logprobs": 0, "chat_template_kwargs": {"a": 1},
}  # fmt: skip
MESSAGE: dict[str, Any] = {
    "model": "m", "max_tokens": 5, "temperature": 0.5, "top_k": 3, "stop_sequences": ["x"],
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": ""}, {"type": "text", "text": "b"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "is_error": True,
             "content": [{"type": "text", "text": "d"}]}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "metadata": {"user_id": "u"}, "stream": True,
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"},
}  # fmt: skip


def response(body: dict[str, Any]) -> None:
    """What a response repeats, and what is stored of it, must be JSON."""
    previous_id(body)
    parsed = parse_response(body, [], True)
    parse_body(CHAT, parsed.chat, {})
    try:
        orjson.dumps([parsed.shown, parsed.messages])
    except TypeError as error:
        raise AssertionError(body) from error


def message(body: dict[str, Any]) -> None:
    thinking = chat_thinking(body.get("thinking"), "{{ enable_thinking }}")
    parse_body(CHAT, {**chat_of(body), **thinking}, {})


def count(body: dict[str, Any]) -> None:
    parse_body(CHAT, counted_chat(body), {})


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a value."""
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for name, part in parts:
        yield (name,)
        if isinstance(part, dict | list):
            yield from ((name, *rest) for rest in places(part))


def error_of(parse: Callable[[dict[str, Any]], None], body: dict[str, Any]) -> str:
    """The error of a body, or ""; another kind of error fails the test."""
    try:
        parse(body)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


COUNTED = {k: v for k, v in MESSAGE.items() if k in ("messages", "system", "tools", "thinking")}


@pytest.mark.parametrize(
    ("parse", "whole"), [(response, RESPONSE), (message, MESSAGE), (count, COUNTED)]
)
def test_odd_values_are_parsed_or_named(
    parse: Callable[[dict[str, Any]], None], whole: dict[str, Any]
) -> None:
    parse(whole)
    for path in places(whole):
        for odd in ODD:
            body = copy.deepcopy(whole)
            place: Any = body
            for name in path[:-1]:
                place = place[name]
            place[path[-1]] = odd
            error = error_of(parse, body)
            assert not [words for words in OF_PYTHON if words in error], (path, odd, error)
