"""Thinking: whether the model reasons before it answers, as its chat template allows."""

from collections.abc import Mapping
from typing import Any

from nanovllm.chat.harmony.history import shows_harmony
from nanovllm.chat.reasoning import END
from nanovllm.chat.template_fields import THINKING_NAMES, reads
from nanovllm.server.chats.fields import given_fields, kind_of

KINDS = {"enabled": True, "adaptive": True, "disabled": False}
REFUSED = {
    "budget_tokens": 'max_tokens bounds reasoning and answer; use {"type": "adaptive"}',
    "display": "reasoning is always shown",
}


def template_thinking(thinking: Any, template: str) -> Mapping[str, str] | None:
    """The `thinking` of a chat with this template; an error if the model cannot do it."""
    if thinking is None:
        return None
    kind = kind_of(thinking, "thinking", tuple(KINDS))
    given_fields(thinking, ("type",), REFUSED, "thinking")
    if any(reads(template, name) for name in THINKING_NAMES):
        return {"type": "enabled" if KINDS[kind] else "disabled"}
    if KINDS[kind] != (END in template or shows_harmony(template)):
        does = "shows no reasoning" if KINDS[kind] else "has no option: the model always reasons"
        raise ValueError(f"thinking.type must not be {kind!r} here: the chat template {does}")
    return None
