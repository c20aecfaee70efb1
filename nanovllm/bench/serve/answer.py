"""Answer: the measured times and tokens of one request, while the chunks of its stream arrive."""

import json
from array import array
from collections.abc import Mapping
from typing import Any

from nanovllm.bench.serve.events import EventReader
from nanovllm.bench.serve.response import Head
from nanovllm.utils.checks import shorten

DONE = b"[DONE]"
DELTA_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")


class AnswerError(RuntimeError):
    """A request that the server refused or did not complete."""


class Answer:
    """A receiver that dates the chunks of a stream; all times are of the client's clock.

    `first` and `last` are the times of the first chunk with text and of the last chunk that belongs
    to the text or ends it. `gaps` has the seconds between chunks from the first one on.
    """

    def __init__(self) -> None:
        self.start = self.first = self.last = 0.0
        self.gaps = array("d")
        self.num_chunks = 0
        self.usage: Mapping[str, Any] = {}
        self.error: str | None = None
        self._is_over = False  # the server has reported the end of the answer
        self._events = EventReader()
        self._body = b""  # of an answer that is not a stream

    def receive(self, now: float, head: Head, data: bytes) -> None:
        """Receive a part of the body: of a stream, or of an error's description."""
        if head.status != 200 or _media_type(head) != "text/event-stream":
            self._body += data
            return
        for payload in self._events.feed(data):
            if payload == DONE:
                self._is_over = True
            else:
                self._take(now, _parse(payload))

    def check(self, head: Head) -> None:
        """The response has ended: raise an AnswerError unless it was a whole answer."""
        if head.status != 200:
            raise AnswerError(f"{head.status} {head.reason}: {error_text(self._body)}")
        if _media_type(head) != "text/event-stream":
            raise AnswerError(
                f"the answer is not a stream, but {_media_type(head)}: {error_text(self._body)}"
            )
        if not self._is_over:
            raise AnswerError("the stream ended without a finish_reason and without [DONE]")
        if not self.first:
            raise AnswerError("the stream has no text and no finish_reason")

    @property
    def input_tokens(self) -> int:
        """Tokens of the prompt, by the server's count; 0 if it has not sent one."""
        return int(self.usage.get("prompt_tokens") or 0)

    @property
    def output_tokens(self) -> int:
        """Generated tokens, by the server's count; without one, the chunks with text."""
        count = self.usage.get("completion_tokens")
        return self.num_chunks if count is None else int(count)

    @property
    def ttft(self) -> float:
        """Seconds to the first chunk with text."""
        return self.first - self.start

    @property
    def e2el(self) -> float:
        """Seconds to the end of the answer."""
        return self.last - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first one; None if there is none, or no time of it."""
        if self.output_tokens < 2 or self.came_at_once:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)

    @property
    def came_at_once(self) -> bool:
        """Whether several tokens came in one chunk, so that the times between them are unknown."""
        return self.output_tokens > 1 and self.num_chunks < 2

    def _take(self, now: float, chunk: Mapping[str, Any]) -> None:
        if chunk.get("error"):
            raise AnswerError(f"error in the stream: {_message(chunk)}")
        if chunk.get("usage"):
            self.usage = chunk["usage"]
        if not (choices := chunk.get("choices")):
            return
        has_text = is_end = False
        for choice in choices:  # usually one
            has_text = has_text or _has_text(choice)
            is_end = is_end or bool(choice.get("finish_reason"))
        self._is_over |= is_end
        if not self.first:
            if not has_text and not is_end:
                return  # only a role: no token yet
            self.first = now
        elif has_text or not is_end:  # without text: a token that ends within a character
            self.gaps.append(now - self.last)
        self.num_chunks += has_text
        self.last = now


def _has_text(choice: Mapping[str, Any]) -> bool:
    """Whether a choice of a chunk brings text, reasoning or a part of a tool call."""
    if choice.get("text"):
        return True
    delta = choice.get("delta")
    return delta is not None and any(delta.get(name) for name in DELTA_TEXTS)


def _parse(payload: bytes) -> Mapping[str, Any]:
    try:
        chunk = json.loads(payload)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise AnswerError(
            f"not a JSON object in the stream: {shorten(payload.decode(errors='replace'))}"
        )
    return chunk


def _media_type(head: Head) -> str:
    return head.headers.get("content-type", "none").partition(";")[0].strip().lower()


def error_text(body: bytes) -> str:
    """The message in the body of an error, which may be JSON of several forms, or any text."""
    try:
        found = _message(json.loads(body))
    except ValueError:
        found = body.decode(errors="replace")
    return " ".join(found.split())[:300] or "no further description"


def _message(value: Any) -> str:
    """The message in an error of the forms that servers use."""
    while isinstance(value, dict):
        name = next((name for name in ("error", "message", "detail") if value.get(name)), None)
        if name is None:
            break
        value = value[name]
    return value if isinstance(value, str) else json.dumps(value)
