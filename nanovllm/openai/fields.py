"""The names of fields in the bodies of requests: which are known, and which are refused."""

from collections.abc import Collection, Mapping
from typing import Any

from nanovllm.beam_search_params import BeamSearchParams
from nanovllm.from_vllm.names.fields import CHATS, COMPLETION
from nanovllm.from_vllm.names.options import SAMPLING as VLLM_NAMES
from nanovllm.openai.field_kinds import (
    AS_OBJECT,
    AS_OBJECTS,
    AS_TEXT,
    FLAG_OR_COUNT,
    FLAG_OR_OBJECT,
    ID,
    IDS,
    MESSAGES,
    OBJECT,
    OBJECTS,
    PROMPTS,
    SALT,
    SWITCH,
    TEXT,
    TEXT_OR_OBJECT,
    Kind,
    check_kinds,
    described,
    integer,
)
from nanovllm.openai.guided import GUIDED
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_name
from nanovllm.utils.json_text import shorten_json
from nanovllm.utils.option import TRUE_OR_FALSE, options_of
from nanovllm.utils.other_names import OtherName

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAMPLING = tuple(options_of(SamplingParams))
BOOLS = tuple(
    name
    for name, described in options_of(SamplingParams).items()
    if described.rule is TRUE_OR_FALSE
)
# The first name is that of the prompt; keywords of `LLM.chat` follow.
INPUTS = {
    CHAT: (
        "messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template",
        "chat_template_kwargs", "cache_salt", "reasoning_effort", "thinking", "documents",
        "add_generation_prompt", "continue_final_message", "add_special_tokens",
        "thinking_token_budget",
    ),
    COMPLETIONS: ("prompt", "cache_salt"),
}  # fmt: skip
FORM = {
    CHAT: ("include_reasoning",),
    COMPLETIONS: ("echo", "best_of", "add_special_tokens"),
}
OPENAI_NAMES = (
    "max_completion_tokens", "top_logprobs", "response_format", "stream", "stream_options",
    "return_token_ids", "return_tokens_as_token_ids", "request_id", "use_beam_search",
    "length_penalty",
)  # fmt: skip
# Accepted without effect on the answer.
NOTES = (
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options",
)  # fmt: skip
KNOWN = {
    url: dict.fromkeys((*names, *FORM[url], *SAMPLING, *OPENAI_NAMES, *GUIDED, *NOTES))
    for url, names in INPUTS.items()
}
OTHERS = {CHAT: CHATS, COMPLETIONS: COMPLETION}
LENGTH_PENALTY = options_of(BeamSearchParams)["length_penalty"]
# What the fields take, in addition to those of `SamplingParams`.
SHARED: dict[str, Kind] = {
    **dict.fromkeys(
        ("stream", "return_token_ids", "return_tokens_as_token_ids", "use_beam_search",
         "add_special_tokens"), SWITCH,
    ),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), IDS),
    "model": TEXT, "stream_options": OBJECT, "response_format": AS_OBJECT, "request_id": ID,
    "cache_salt": SALT, "length_penalty": Kind(LENGTH_PENALTY.check, {"type": "number"}),
    "logprobs": FLAG_OR_COUNT, "top_logprobs": integer(0), "max_completion_tokens": integer(1),
}  # fmt: skip
NO_TOKENS = described({"type": "integer", "minimum": 0})  # with `echo`
KINDS: dict[str, dict[str, Kind]] = {
    CHAT: {
        **SHARED,
        **dict.fromkeys(
            ("parallel_tool_calls", "add_generation_prompt", "continue_final_message",
             "include_reasoning"), SWITCH,
        ),
        "messages": MESSAGES, "tools": AS_OBJECTS, "tool_choice": TEXT_OR_OBJECT,
        "chat_template": AS_TEXT, "chat_template_kwargs": OBJECT, "thinking": FLAG_OR_OBJECT,
        "documents": OBJECTS,
        "thinking_token_budget": described({"type": "integer", "minimum": 0}),
    },
    COMPLETIONS: {
        **SHARED, "prompt": PROMPTS, "echo": SWITCH, "best_of": integer(1),
        "max_tokens": NO_TOKENS, "max_completion_tokens": NO_TOKENS,
    },
}  # fmt: skip


def known_fields(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a chat or a completion that are not null; an unknown one is an error."""
    known, given = KNOWN[url], without_others(body, OTHERS[url])
    for name, value in given.items():
        if name in VLLM_NAMES and name not in known:
            why = VLLM_NAMES[name].why.replace("`", "")
            raise ValueError(f"unknown field {name!r}: {why}")
        check_name(name, known)
        if name in SAMPLING and options_of(SamplingParams)[name].only_python and value:
            raise ValueError(f"{name} is for calls in Python, not for requests; leave it out")
    check_kinds(given, KINDS[url])
    return given


def given_fields(
    body: Mapping[str, Any], names: Collection[str], others: Mapping[str, OtherName] | None = None
) -> dict[str, Any]:
    """The fields that are not null; others than `names` and the common ones are errors."""
    given = without_others(body, others or {})
    for name in given:
        check_name(name, (*names, "model", "user"))
    _check_model(given)
    return given


def without_others(body: Mapping[str, Any], others: Mapping[str, OtherName]) -> dict[str, Any]:
    """The fields that are not null, without `others`, whose values must be accepted ones."""
    given = {name: value for name, value in body.items() if value is not None}
    for name in given.keys() & others.keys():
        others[name].check(name, given.pop(name))
    return given


def _check_model(body: Mapping[str, Any]) -> None:
    if not isinstance(body.get("model", ""), str):
        raise TypeError(f"model must be a text, got {shorten_json(body['model'])}")
