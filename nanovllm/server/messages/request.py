"""Parse the body of a request for a message into that of a chat."""

from collections.abc import Mapping
from typing import Any

from nanovllm.openai.field_kinds import (
    AS_OBJECT,
    AS_OBJECTS,
    LIST,
    SWITCH,
    TEXT_OR_LIST,
    Kind,
    check_kinds,
    described,
    integer,
)
from nanovllm.openai.fields import KINDS as CHAT_KINDS
from nanovllm.openai.request import CHAT
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.chats.fields import given_fields, kind_of, list_in, text_in
from nanovllm.server.messages.turns import messages_of
from nanovllm.utils.json_text import check_json_bool
from nanovllm.utils.option import options_of

OWN = (
    "model", "messages", "system", "max_tokens", "stop_sequences", "tools", "tool_choice",
    "metadata", "thinking", "output_config", "stream", "service_tier", "cache_control",
)  # fmt: skip
# Fields of a chat that mean the same here: parameters of sampling.
NOT_HERE = ("n", "stop", "logprobs", "prompt_logprobs", "structured_outputs")
SAMPLING = [name for name in options_of(SamplingParams) if name not in NOT_HERE]
SAME = (*SAMPLING, "chat_template_kwargs", "cache_salt")
KNOWN = dict.fromkeys((*OWN, *SAME))
COUNTED = (
    "model", "messages", "system", "tools", "tool_choice", "thinking", "output_config",
    "cache_control", "chat_template_kwargs",
)  # fmt: skip
SAME_KINDS = {name: kind for name, kind in CHAT_KINDS[CHAT].items() if name in ("model", *SAME)}
KINDS: dict[str, Kind] = {
    **SAME_KINDS,
    "messages": LIST, "system": TEXT_OR_LIST, "max_tokens": integer(1), "tools": AS_OBJECTS,
    "stop_sequences": described({"type": "array", "items": {"type": "string"}}),
    "tool_choice": AS_OBJECT, "metadata": AS_OBJECT, "thinking": AS_OBJECT,
    "output_config": AS_OBJECT, "stream": SWITCH,
}  # fmt: skip
REFUSED = {
    "stop": "use stop_sequences",
    "structured_outputs": "use output_config.format",
    "response_format": "use output_config.format",
    "output_format": "use output_config.format",
    "reasoning_effort": "use output_config.effort",
    "mcp_servers": "this server calls no tools",
    "container": "this server runs no code",
    "context_management": "send fewer messages",
    "n": "a message has one answer",
    "logprobs": "use /v1/chat/completions",
    "prompt_logprobs": "use /v1/chat/completions",
}
# What errors of chats call fields, as patterns, and their names here.
NAMES = {
    r"tools(\[\d+\])\.function\.parameters": r"tools\1.input_schema",
    r"tools(\[\d+\])\.function": r"tools\1",
    r"response_format\.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "structured_outputs": "output_config.format",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
# Arguments are always streamed as they come, and every prefix is cached.
TOOL_NOTES = ("eager_input_streaming", "cache_control")
TOOL = ("type", "name", "description", "input_schema", "strict", *TOOL_NOTES)
CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": "function"}


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat that asks for a message."""
    given = given_fields(body, KNOWN, REFUSED)
    for name in ("max_tokens", "messages"):
        if name not in given:
            raise ValueError(f"{name} is missing")
    check_kinds(given, KINDS)
    stops = [
        text_in(text, f"stop_sequences[{index}]")
        for index, text in enumerate(list_in(given.get("stop_sequences", []), "stop_sequences"))
    ]
    given_fields(given.get("metadata", {}), ("user_id",), {}, "metadata")
    return {
        **{name: given[name] for name in SAME if name in given},
        **_conversation(given),
        "max_tokens": given["max_tokens"],
        "stop": stops or None,
        "stream": given.get("stream", False),
        "service_tier": given.get("service_tier"),
        "n": 1,
    }


def counted_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat whose prompt is to be counted."""
    given = given_fields(body, COUNTED, {})
    check_kinds(given, KINDS)
    if "messages" not in given:
        raise ValueError("messages is missing")
    return {**_conversation(given), "truncate_prompt_tokens": -1}  # it may be of any length


def _conversation(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a chat that its prompt is made of."""
    tools = list_in(given.get("tools", []), "tools")
    output = given_fields(given.get("output_config", {}), ("format", "effort"), {}, "output_config")
    chat = {
        "model": given.get("model"),
        "messages": messages_of(given["messages"], given.get("system")),
        "tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)] or None,
        "response_format": _response_format(output.get("format")),
        "reasoning_effort": output.get("effort"),
        "chat_template_kwargs": given.get("chat_template_kwargs"),
    }
    return {**chat, **_choice(given.get("tool_choice"))}


def _tool(tool: Any, place: str) -> dict[str, Any]:
    """A function in the form of chats."""
    kind_of(tool, place, ("custom",), "custom")
    given = given_fields(tool, TOOL, {}, place)
    if "input_schema" not in given:
        raise ValueError(f"{place}.input_schema is missing")
    function = {name: given[name] for name in ("name", "description", "strict") if name in given}
    return {"type": "function", "function": {**function, "parameters": given["input_schema"]}}


def _choice(choice: Any) -> dict[str, Any]:
    """Which tools an answer may or must call, in the form of chats."""
    if choice is None:
        return {}
    kind = kind_of(choice, "tool_choice", tuple(CHOICES))
    names = ("type", "disable_parallel_tool_use", *(["name"] if kind == "tool" else []))
    given = given_fields(choice, names, {}, "tool_choice")
    where = "tool_choice.disable_parallel_tool_use"
    is_single = check_json_bool(where, given.get("disable_parallel_tool_use", False))
    chosen: Any = CHOICES[kind]
    if kind == "tool":
        name = text_in(given.get("name"), "tool_choice.name")
        chosen = {"type": "function", "function": {"name": name}}
    return {"tool_choice": chosen, **({"parallel_tool_calls": False} if is_single else {})}


def _response_format(wanted: Any) -> dict[str, Any] | None:
    """The `response_format` of a chat with this format."""
    if wanted is None:
        return None
    kind = kind_of(wanted, "output_config.format", ("json_schema",))
    given = given_fields(wanted, ("type", "schema"), {}, "output_config.format")
    if "schema" not in given:
        raise ValueError("output_config.format.schema is missing")
    return {"type": kind, kind: {"name": "answer", "schema": given["schema"]}}
