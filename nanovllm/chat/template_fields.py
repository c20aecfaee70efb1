"""Which variables a chat template reads, and the fields of requests that only some templates take.

A template's own parser says which names it looks up: a name in its text or in a comment is none.
"""

import functools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.utils.checks import check_name, shorten

if TYPE_CHECKING:
    from jinja2 import Environment, nodes

FIELDS = ("reasoning_effort", "thinking", "documents")
# How templates call what `{"type": "enabled"}` turns on.
THINKING_NAMES = ("enable_thinking", "thinking")
THINKING_TYPES = ("enabled", "disabled")
# What a template gets from the chat, and arguments of transformers' `apply_chat_template` that no
# template sees.
RESERVED = {
    **dict.fromkeys(
        ("messages", "conversation", "conversations"), "the template gets the chat's messages"
    ),
    "tools": "give tools next to it",
    **dict.fromkeys(
        ("self", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length",
         "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        "it is an argument of transformers' tokenizer, and no option of the template",
    ),
}  # fmt: skip


@functools.lru_cache(16)
def variables_of(template: str) -> frozenset[str] | None:
    """The variables that a template reads and does not set itself; None if it is not valid."""
    from jinja2 import meta

    parsed = parsed_template(template)
    return None if parsed is None else frozenset(meta.find_undeclared_variables(parsed))


def parsed_template(template: str) -> "nodes.Template | None":
    """A template as Jinja's parser reads it; None if it is not valid."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        environment: Environment = _compile_jinja_template(template).environment
        return environment.parse(template)
    except (TemplateError, ImportError, AttributeError):
        return None


def reads(template: str, name: str) -> bool:
    """Whether a template reads a variable. If it is not valid, whether its text has the name."""
    found = variables_of(template)
    if found is not None:
        return name in found
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def check_template_options(options: Any) -> Mapping[str, Any]:
    """The options of a template in `chat_template_kwargs`, which may have all other names."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise TypeError(f"chat_template_kwargs must be a dict, got {shorten(options)}")
    for name in (name for name in options if name in RESERVED):
        raise ValueError(f"chat_template_kwargs must not have {name!r}: {RESERVED[name]}")
    return options


def unread_fields(template: str, keywords: Mapping[str, Any]) -> list[str]:
    """The fields among these keywords of a chat that change nothing, as the template is."""
    return [
        name
        for name in FIELDS
        if keywords.get(name) is not None
        and not any(reads(template, one) for one in _names(name, keywords[name]))
    ]


def template_keywords(template: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords with `thinking` as the template has it.

    It may be an object of Anthropic's API, `{"type": "enabled"}`: the template then gets true or
    false. A field that the template does not read is a ValueError.
    """
    keywords = dict(keywords)
    for name in unread_fields(template, keywords):
        raise ValueError(f"{name}: the chat template does not mention it")
    thinking = keywords.get("thinking")
    if not isinstance(thinking, Mapping):
        return keywords
    enabled = _is_enabled(thinking)
    del keywords["thinking"]
    name = next(one for one in THINKING_NAMES if reads(template, one))
    return {name: enabled, **keywords}


def _names(name: str, value: Any) -> tuple[str, ...]:
    """The variables that a field may become."""
    return THINKING_NAMES if name == "thinking" and isinstance(value, Mapping) else (name,)


def _is_enabled(thinking: Mapping[str, Any]) -> bool:
    for name in thinking:
        check_name(name, ("type", "budget_tokens"), "thinking: ")
    kind = thinking.get("type")
    if kind not in THINKING_TYPES:
        raise ValueError(f'thinking.type must be "enabled" or "disabled", got {shorten(kind)}')
    return bool(kind == "enabled")
