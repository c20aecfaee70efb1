"""Parse the body of a request for a response into a chat, and what the response repeats of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from nanovllm.openai.field_kinds import (
    AS_OBJECT,
    AS_OBJECTS,
    AS_TEXT,
    OBJECT,
    SWITCH,
    TEXT_OR_LIST,
    TEXT_OR_OBJECT,
    Kind,
    check_kinds,
    described,
    integer,
)
from nanovllm.openai.fields import KINDS as CHAT_KINDS
from nanovllm.openai.request import CHAT
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.chats.fields import check_fixed, given_fields, list_in, text_in
from nanovllm.server.responses.items import messages_of
from nanovllm.server.responses.options import chat_choice, chat_tool, effort_of, response_format
from nanovllm.utils.checks import check_name
from nanovllm.utils.option import options_of

OWN = (
    "input", "instructions", "tools", "tool_choice", "text", "max_output_tokens", "metadata",
    "store", "previous_response_id", "reasoning", "parallel_tool_calls", "stream",
    "stream_options", "truncation", "background", "include", "top_logprobs",
)  # fmt: skip
# Fields of a chat that mean the same here: parameters of sampling without OpenAI's name for them.
NOT_HERE = ("n", "logprobs", "prompt_logprobs", "max_tokens", "structured_outputs")
SAMPLING = [name for name in options_of(SamplingParams) if name not in NOT_HERE]
SAME = (*SAMPLING, "chat_template_kwargs", "cache_salt")
# Accepted without effect on the answer, as in chats.
NOTES = (
    "model", "user", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options",
)  # fmt: skip
KNOWN = dict.fromkeys((*OWN, *SAME, *NOTES))
REFUSED = {
    "conversation": "use previous_response_id, or send all items as input",
    "prompt": "this server has no prompt templates; send instructions and input",
    "max_tool_calls": "there are no built-in tools; use parallel_tool_calls",
    "context_management": "send fewer items",
    "max_tokens": "use max_output_tokens",
    "messages": "use input",
    "response_format": "use text.format",
    "structured_outputs": "use text.format",
    "reasoning_effort": "use reasoning.effort",
    "n": "a response has one answer",
    "logprobs": "use /v1/chat/completions",
    "prompt_logprobs": "use /v1/chat/completions",
}
FIXED: dict[str, tuple[Any, str]] = {
    "truncation": ("disabled", "send fewer items"),
    "background": (False, "a request is answered while its client waits"),
    "include": ([], "items have all that there is of them"),
    "top_logprobs": (0, "use /v1/chat/completions"),
}
SAME_KINDS = {name: kind for name, kind in CHAT_KINDS[CHAT].items() if name in (*SAME, *NOTES)}
KINDS: dict[str, Kind] = {
    **SAME_KINDS,
    **{name: described({"enum": [value]}) for name, (value, _) in FIXED.items()},
    "input": TEXT_OR_LIST, "instructions": AS_TEXT, "tools": AS_OBJECTS,
    "tool_choice": TEXT_OR_OBJECT, "text": AS_OBJECT, "reasoning": AS_OBJECT,
    "max_output_tokens": integer(1), "store": SWITCH, "stream": SWITCH, "stream_options": OBJECT,
    "previous_response_id": AS_TEXT, "parallel_tool_calls": SWITCH,
    "metadata": described({"type": "object", "additionalProperties": {"type": "string"}}),
}  # fmt: skip
# What errors of chats call fields, as patterns, and their names here.
NAMES = {
    # Without an index: several items are one message, and instructions and earlier ones precede.
    r"messages(\[\d+\])?": "input",
    r"tools(\[\d+\])\.function": r"tools\1",
    r"response_format\.json_schema": "text.format",
    "response_format": "text.format",
    "structured_outputs": "text.format",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}


@dataclass(frozen=True)
class ResponseRequest:
    """A parsed body. `chat` is it as a chat, and `shown` what the response repeats of it.

    `messages` are those of the conversation, without instructions.
    """

    chat: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    shown: Mapping[str, Any]
    stores: bool


def previous_id(body: Mapping[str, Any]) -> str | None:
    """The id of the response that a body continues."""
    given = body.get("previous_response_id")
    return None if given is None else text_in(given, "previous_response_id")


def parse_response(
    body: Mapping[str, Any], before: Sequence[Mapping[str, Any]], stores: bool
) -> ResponseRequest:
    """Parse a body that continues the messages `before`.

    `stores` says whether responses are stored unless a body says that they are not.
    """
    given = given_fields(body, KNOWN, REFUSED)
    check_fixed(given, FIXED)
    check_kinds(given, KINDS)
    if "input" not in given:
        raise ValueError("input is missing")
    messages = [*before, *messages_of(given["input"], "input")]
    instructions = given.get("instructions")
    first = () if instructions is None else (_system(text_in(instructions, "instructions")),)
    tools = [
        chat_tool(t, f"tools[{i}]") for i, t in enumerate(list_in(given.get("tools", []), "tools"))
    ]
    streams, wants = given.get("stream", False), given.get("store", stores)
    if wants and not stores:
        raise ValueError("store must be false: this server stores none (max_responses)")
    chat = {
        **{name: given[name] for name in (*SAME, *NOTES) if name in given},
        "messages": [*first, *messages],
        "tools": tools or None,
        "tool_choice": chat_choice(given.get("tool_choice")),
        "parallel_tool_calls": given.get("parallel_tool_calls"),
        "response_format": response_format(given.get("text")),
        "reasoning_effort": effort_of(given.get("reasoning")),
        "max_tokens": given.get("max_output_tokens"),
        "stream": streams,
        "stream_options": _stream_options(given.get("stream_options"), streams),
        "n": 1,
    }
    shown = _shown(given, wants)
    for name, value in shown.items():
        _check_json(name, value)
    return ResponseRequest(chat, messages, shown, wants)


def _shown(given: Mapping[str, Any], stores: bool) -> dict[str, Any]:
    """The fields that a response repeats."""
    effort = effort_of(given.get("reasoning"))
    described = given.get("text", {}).get("format") or {"type": "text"}
    return {
        "background": False,
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "metadata": _metadata(given.get("metadata", {})),
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "previous_response_id": given.get("previous_response_id"),
        "reasoning": {"effort": effort, "summary": None},
        "store": stores,
        "text": {"format": described},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [{"description": None, "strict": None, **tool} for tool in given.get("tools", [])],
        "truncation": "disabled",
        "user": given.get("user"),
    }


def _check_json(name: str, value: Any) -> None:
    """Raise for a value that the response cannot repeat: half a character, or a long integer."""
    try:
        orjson.dumps(value)
    except TypeError as error:
        raise ValueError(f"{name} cannot be repeated in the response: {error}") from None


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _metadata(metadata: Any) -> dict[str, str]:
    """The metadata, texts by names, which the response repeats."""
    given = given_fields(metadata, metadata, {}, "metadata")
    return {name: text_in(text, f"metadata.{name}") for name, text in given.items()}


def _stream_options(options: Any, streams: bool) -> dict[str, Any] | None:
    """The options of a stream. Its last event always has the usage."""
    if options is None:
        return None
    if not streams:
        raise ValueError("stream_options needs stream to be true")
    for name in options:
        check_name(name, ("include_obfuscation",), "stream_options: ")
    return None
