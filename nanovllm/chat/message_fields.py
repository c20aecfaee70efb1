"""The fields of messages, of which a chat may have no others: they would be ignored.

They are those of OpenAI's API, those of answers that are sent back, and what the template reads.
"""

from collections.abc import Mapping
from typing import Any

from nanovllm.chat.template_names import names_in, reads_whole
from nanovllm.utils.checks import check_name, shorten

# What clients send back of answers, theirs and those of other servers, and how they want prompts
# to be cached (every prefix is). These may be at any level of a message.
NOTES = (
    "id", "index", "thinking", "finish_reason", "token_ids", "weight", "extra_content",
    "provider_specific_fields", "cache_control", "prompt_cache_breakpoint",
)  # fmt: skip
ANSWERED = (
    "reasoning", "reasoning_content", "reasoning_details", "thinking_blocks", "refusal",
    "annotations", "parsed",
)  # fmt: skip
MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", *ANSWERED, *NOTES)
CALL = ("type", "function", *NOTES)
FUNCTION = ("name", "arguments", "parsed_arguments", *NOTES)
PART = ("type", "annotations", "logprobs", *NOTES)
REFUSED = {
    "audio": "models are text only",
    "images": "models are text only",
    "function_call": "use tool_calls",
    "prefix": "use continue_final_message",
    "tools": "use the field of the request",
}


def check_fields(
    place: str, given: Mapping[str, Any], known: tuple[str, ...], template: str
) -> None:
    """Raise for a field that is neither known nor read by the template, unless it is empty."""
    for name, value in given.items():
        if not isinstance(name, str):
            raise TypeError(f"{place}: names of fields must be texts, got {shorten(name)}")
        if name in known or _is_empty(value) or name in names_in(template) or reads_whole(template):
            continue
        if name in REFUSED:
            raise ValueError(f"{place}.{name} is not supported: {REFUSED[name]}")
        check_name(name, known, f"{place}: ")


def _is_empty(value: Any) -> bool:
    """Whether a value is null, false, or a text, a list or an object of nothing."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)
