"""Thinking: whether the model reasons before it answers, as its chat template allows."""

import re
from collections.abc import Mapping
from typing import Any

from nanovllm.chat.harmony.history import shows_harmony
from nanovllm.chat.reasoning import END
from nanovllm.server.chats.fields import given_fields, kind_of

SWITCH = "enable_thinking"  # the option of templates that can do both
FIELDS = {"enabled": ("budget_tokens",), "adaptive": (), "disabled": ()}
REFUSED = {
    "budget_tokens": 'max_tokens bounds reasoning and answer; use {"type": "adaptive"}',
    "display": "reasoning is always shown",
}


def template_options(thinking: Any, template: str) -> Mapping[str, bool]:
    """The options of the chat template for this `thinking`; an error if the model cannot do it."""
    if thinking is None:
        return {}
    kind = kind_of(thinking, "thinking", tuple(FIELDS))
    given_fields(thinking, ("type",), REFUSED, "thinking")
    wanted = kind != "disabled"
    if re.search(rf"\b{SWITCH}\b", template):
        return {SWITCH: wanted}
    if wanted != (END in template or shows_harmony(template)):
        does = "shows no reasoning" if wanted else "has no option for it: the model always reasons"
        raise ValueError(f"thinking.type must not be {kind!r} here: the chat template {does}")
    return {}
