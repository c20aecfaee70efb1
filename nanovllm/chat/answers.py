"""Answers of chats: divided into reasoning, content and tool calls, whole or piece by piece."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.chat.reasoning import Reasoning, ReasoningReader
from nanovllm.chat.tool_formats.base import ToolFormat
from nanovllm.chat.tool_formats.parser import Delta, ToolParser
from nanovllm.chat.tools import Tool
from nanovllm.outputs import RequestOutput

if TYPE_CHECKING:
    from nanovllm.chat.harmony.turns import HarmonyAnswer


class AnswerFormat(NamedTuple):
    """How an answer is parsed. If reasoning, tools and harmony are None, all of it is content.

    The answer may call the tools `offered`. `harmony` is a format of both reasoning and calls.
    """

    reasoning: Reasoning | None = None
    tools: ToolFormat | None = None
    offered: tuple[Tool, ...] = ()
    harmony: "HarmonyAnswer | None" = None

    def reader(self) -> "AnswerReader":
        """A reader of one answer in this format, piece by piece."""
        return AnswerReader(self)

    def message(self, text: str, token_ids: Sequence[int] = ()) -> dict[str, Any]:
        """The message of a whole answer, as OpenAI writes it, with `reasoning_content`.

        `token_ids` are the answer's tokens. Without them, harmony takes those of the text.
        """
        if self.harmony is not None and not token_ids:
            token_ids = self.harmony.tokens_of(text)
        message: dict[str, Any] = {"role": "assistant", "content": None}
        _add(message, AnswerReader(self, early=False).feed(text, True, token_ids))
        for call in message.get("tool_calls", ()):
            del call["index"]
        if message == {"role": "assistant", "content": None}:
            message["content"] = ""
        return message

    def add_messages(self, output: RequestOutput) -> None:
        """Give an output, and each of its samples, a `message`."""
        for sample in output["outputs"]:
            sample["message"] = self.message(sample["text"], sample["token_ids"])
        output["message"] = output["outputs"][0]["message"]


PLAIN = AnswerFormat()


class AnswerReader:
    """Takes an answer in pieces, and makes deltas as OpenAI writes them in streams.

    The deltas add up to the same message for any division into pieces. One exception: with `early`,
    a call that is cut off stays a call (see ToolParser).
    """

    def __init__(self, answer: AnswerFormat, early: bool = True) -> None:
        reasoning, tools, offered, harmony = answer
        self._harmony = None if harmony is None else harmony.reader(early)
        self._reasoning = None if reasoning is None else ReasoningReader(reasoning.inside)
        self._tools = None if tools is None else ToolParser(tools, offered, early)

    def feed(self, text: str, ended: bool = False, token_ids: Iterable[int] = ()) -> dict[str, Any]:
        """The delta that one more piece makes certain, or {}; `ended`: it is the last piece.

        `token_ids` are the new tokens. Each comes with its text, or before it.
        """
        delta: dict[str, Any] = {}
        if self._harmony is not None:
            for part in self._harmony.feed(text, token_ids, ended):
                _add(delta, _written(part))
            return delta
        if self._reasoning is not None:
            reasoning, text = self._reasoning.feed(text, ended)
            if reasoning:
                delta["reasoning_content"] = reasoning
        if self._tools is None:
            if text:
                delta["content"] = text
            return delta
        parts = self._tools.feed(text)
        for part in [*parts, *(self._tools.finish() if ended else ())]:
            _add(delta, _written(part))
        return delta


def _written(part: Delta) -> dict[str, Any]:
    """A part of an answer as OpenAI writes it."""
    if part.reasoning:
        return {"reasoning_content": part.reasoning}
    if part.call is None:
        return {"content": part.content}
    call: dict[str, Any] = {"index": part.call}
    if part.name:
        call |= {"id": part.call_id, "type": "function"}
        call["function"] = {"name": part.name, "arguments": ""}
    else:
        call["function"] = {"arguments": part.arguments}
    return {"tool_calls": [call]}


def _add(whole: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to a message, or to another delta."""
    for name in ("reasoning_content", "content"):
        if name in delta:
            whole[name] = (whole.get(name) or "") + delta[name]
    for call in delta.get("tool_calls", ()):
        calls = whole.setdefault("tool_calls", [])
        if calls and calls[-1]["index"] == call["index"]:
            calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        else:
            calls.append(call)
