"""Form: how an API writes the answer to one request, whole or as server-sent events."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import orjson

from nanovllm.openai.request import APIRequest
from nanovllm.server.chats.blocks import Block, Step
from nanovllm.server.chats.fields import renamed
from nanovllm.server.errors import APIError

ABORTED = "the request was aborted"


class Usage(NamedTuple):
    """The tokens of a request; `cached` ones are part of the prompt, `reasoning` of the answer."""

    prompt: int
    cached: int
    answer: int
    reasoning: int


class Ending(NamedTuple):
    """How an answer has ended. `stop` is the stop string or token id, or why there is an error."""

    reason: str
    stop: int | str | None
    usage: Usage

    @property
    def failure(self) -> str | None:
        """What was wrong, if the answer has ended before its end."""
        if self.reason == "error":
            return str(self.stop)
        return ABORTED if self.reason == "abort" else None


class Form(Protocol):
    """Writes the answer to one request; a method is called once unless it says otherwise.

    `asked` is the request as a chat; before any method is called it gets what the chat template
    has changed. The names of its fields become those in `names`.
    """

    asked: APIRequest
    names: Mapping[str, str]

    def body(self, blocks: Sequence[Block], ending: Ending) -> Mapping[str, Any]:
        """The body of a whole answer."""

    def begin(self, num_prompt_tokens: int) -> bytes:
        """The first events of a stream."""

    def write(self, step: Step) -> bytes:
        """The events for each step, and for the end of the last block."""

    def end(self, blocks: Sequence[Block], ending: Ending) -> bytes:
        """The last events of a stream."""

    def fail(self, error: APIError) -> bytes:
        """The last events of a stream that has begun and has failed."""


def without_effect(form: Form) -> dict[str, Any]:
    """The field of an answer that lists fields which the chat template does not take, if any."""
    names = [renamed(name, form.names) for name in form.asked.no_effect]
    return {"fields_without_effect": names} if names else {}


def named_event(name: str, value: Mapping[str, Any]) -> bytes:
    """A server-sent event with a name, which is also the `type` in its data."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, **value}))
