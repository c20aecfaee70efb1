"""The fields of messages, of which a chat may have no others: they would be ignored.

They are those of OpenAI's API, those of answers that are sent back, and what the template reads.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

from nanovllm.chat.template_fields import parsed_template
from nanovllm.utils.checks import check_name

# What clients send back of answers, theirs and those of other servers, is part of a conversation.
ANSWERED = (
    "reasoning", "reasoning_content", "reasoning_details", "thinking_blocks", "refusal",
    "annotations", "parsed", "provider_specific_fields",
)  # fmt: skip
MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", *ANSWERED)
CALL = ("id", "type", "function", "index", "provider_specific_fields")
FUNCTION = ("name", "arguments", "parsed_arguments")
PART = ("type", "text", "id", "index", "annotations", "logprobs", "cache_control")
REFUSED = {"audio": "models are text only", "function_call": "use tool_calls"}


def check_fields(
    place: str, given: Mapping[str, Any], known: tuple[str, ...], template: str
) -> None:
    """Raise for a field that is neither known nor read by the template; null counts as missing."""
    for name, value in given.items():
        if name in known or value is None or name in names_in(template):
            continue
        if name in REFUSED:
            raise ValueError(f"{place}.{name} is not supported: {REFUSED[name]}")
        check_name(name, known, f"{place}: ")


@functools.lru_cache(16)
def names_in(template: str) -> frozenset[Any]:
    """The attributes and the items that a template reads of anything, and its texts."""
    from jinja2 import nodes

    parsed = parsed_template(template)
    if parsed is None:
        return frozenset(re.findall(r"\w+", template))
    attributes = {node.attr for node in parsed.find_all(nodes.Getattr)}
    return frozenset(attributes | {node.value for node in parsed.find_all(nodes.Const)})
