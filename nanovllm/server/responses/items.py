"""Items of a response's input, or of its output, as messages of a chat."""

from collections.abc import Mapping
from typing import Any

from nanovllm.server.chats.fields import given_fields, joined_texts, kind_of, list_in, text_in
from nanovllm.utils.checks import check_choice
from nanovllm.utils.json_text import shorten_json

ROLES = ("user", "assistant", "system", "developer")
FIELDS = {
    "message": ("role", "content"),
    "reasoning": ("content", "summary"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
COMMON = ("type", "id", "status")  # of all items; they are no part of the conversation
REFUSED = {
    "encrypted_content": "send the text of the reasoning as `content`",
    "phase": "chat templates know no phases",
}
PARTS = ("input_text", "output_text", "text")
REFUSAL = "refusal"  # a part of an assistant's message
# Of texts in responses that are sent back, and how a client wants prompts to be cached.
PART_FIELDS = ("annotations", "logprobs", "prompt_cache_breakpoint")


class Conversation:
    """Makes messages of items. Those of one answer, which follow each other, are one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._is_open = False  # the last message is an answer that items may add to

    def add(self, item: Any, place: str) -> None:
        """Add an item; `place` names it in errors."""
        kind = kind_of(item, place, tuple(FIELDS), "message")
        given = given_fields(item, (*FIELDS[kind], *COMMON), REFUSED, place)
        getattr(self, f"_add_{kind}")(given, place)

    def _add_message(self, item: Mapping[str, Any], place: str) -> None:
        role = check_choice(f"{place}.role", item.get("role"), ROLES)
        kinds = (*PARTS, REFUSAL) if role == "assistant" else PARTS
        text = joined_texts(item.get("content"), f"{place}.content", kinds, PART_FIELDS)
        if role != "assistant":
            self._append({"role": role, "content": text})
            return
        answer = self._answer("content")
        answer["content"] = text

    def _add_reasoning(self, item: Mapping[str, Any], place: str) -> None:
        """Add the reasoning's text, or where there is none, its summary."""
        found = [
            joined_texts(item.get(name) or [], f"{place}.{name}", (kind,), ())
            for name, kind in (("content", "reasoning_text"), ("summary", "summary_text"))
        ]
        text = found[0] or found[1]
        if text:
            self._answer("content", "tool_calls", "reasoning_content")["reasoning_content"] = text

    def _add_function_call(self, item: Mapping[str, Any], place: str) -> None:
        call_id, name, arguments = (
            text_in(item.get(field), f"{place}.{field}") for field in FIELDS["function_call"]
        )
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._answer().setdefault("tool_calls", []).append(call)

    def _add_function_call_output(self, item: Mapping[str, Any], place: str) -> None:
        call_id = text_in(item.get("call_id"), f"{place}.call_id")
        text = joined_texts(item.get("output"), f"{place}.output", PARTS, PART_FIELDS)
        self._append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _answer(self, *names: str) -> dict[str, Any]:
        """The message of the answer; a new one if it already has one of these fields."""
        if not self._is_open or any(self.messages[-1].get(name) for name in names):
            self._append({"role": "assistant", "content": None})
            self._is_open = True
        return self.messages[-1]

    def _append(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self._is_open = False


def messages_of(items: Any, place: str) -> list[dict[str, Any]]:
    """The messages of a text, which a user says, or of a list of items."""
    if isinstance(items, str):
        return [{"role": "user", "content": text_in(items, place)}]
    if not isinstance(items, list):
        raise TypeError(f"{place} must be a text or a list of items, got {shorten_json(items)}")
    conversation = Conversation()
    for index, item in enumerate(list_in(items, place)):
        conversation.add(item, f"{place}[{index}]")
    return conversation.messages
