"""Thinking: whether the model reasons before it answers, as its chat template allows."""

from collections.abc import Mapping
from typing import Any

from nanovllm.chat.harmony.history import shows_harmony
from nanovllm.chat.reasoning import END
from nanovllm.chat.reasoning_budget import NAME as BUDGET
from nanovllm.chat.template_fields import THINKING_NAMES, reads
from nanovllm.server.chats.fields import given_fields, kind_of

KINDS = {"enabled": True, "adaptive": True, "disabled": False}
REFUSED = {"display": "reasoning is always shown"}


def chat_thinking(thinking: Any, template: str) -> Mapping[str, Any]:
    """The fields of a chat with this template that mean `thinking`.

    What the model cannot do is an error. The chat checks the budget, a bound for reasoning.
    """
    if thinking is None:
        return {}
    kind = kind_of(thinking, "thinking", tuple(KINDS))
    own = ("budget_tokens",) if kind == "enabled" else ()
    budget = given_fields(thinking, ("type", *own), REFUSED, "thinking").get("budget_tokens")
    fields = {} if budget is None else {BUDGET: budget}
    if any(reads(template, name) for name in THINKING_NAMES):
        return {**fields, "thinking": {"type": "enabled" if KINDS[kind] else "disabled"}}
    if KINDS[kind] != (END in template or shows_harmony(template)):
        does = "shows no reasoning" if KINDS[kind] else "has no option: the model always reasons"
        raise ValueError(f"thinking.type must not be {kind!r} here: the chat template {does}")
    return fields
