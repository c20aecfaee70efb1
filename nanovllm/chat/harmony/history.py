"""Conversations and tools as gpt-oss's chat template reads them.

The template drops what it does not expect, or fails: it reads the instructions of the first message
alone, one call of a message, reasoning as `thinking`, and descriptions of all tools. Which
reasoning the model sees again is the template's own choice: that of calls without a final answer.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.utils.checks import check_choice

Message = Mapping[str, Any]
SIGN = re.compile(r"<\|channel\|>(analysis|final)")
EFFORTS = ("low", "medium", "high")
INSTRUCTIONS = ("system", "developer")


def shows_harmony(template: str) -> bool:
    """Whether a chat template writes conversations in harmony."""
    return SIGN.search(template) is not None


def harmony_messages(place: str, messages: Sequence[Message]) -> list[Message]:
    """The messages of a conversation for the template; `place` names it in errors."""
    found, rest = _with_one_instruction(place, messages)
    while rest:
        message, *rest = rest
        if message["role"] != "assistant":
            found.append(message)
            continue
        message = _with_thinking(message)
        calls = message.get("tool_calls")
        if not calls:
            found.append({name: message[name] for name in message if name != "tool_calls"})
            continue
        number = next((i for i, one in enumerate(rest) if one["role"] != "tool"), len(rest))
        found += _one_by_one(message, calls, rest[:number])
        rest = rest[number:]
    return found


def _with_one_instruction(
    place: str, messages: Sequence[Message]
) -> tuple[list[Message], list[Message]]:
    """The system and developer messages at the start as one message, and the messages after."""
    number = next(
        (i for i, one in enumerate(messages) if one["role"] not in INSTRUCTIONS), len(messages)
    )
    for index, message in enumerate(messages[number:], start=number):
        if message["role"] in INSTRUCTIONS:
            raise ValueError(
                f"{place}[{index}]: the chat template shows {message['role']} messages only at the"
                " start of a conversation"
            )
    texts = [str(message["content"]) for message in messages[:number]]
    first = {**messages[0], "content": "\n\n".join(texts)}
    return [first] if number else [], list(messages[number:])


def _with_thinking(message: Message) -> Message:
    """A message with its reasoning, if there is any, as `thinking`.

    The template takes only one of content and reasoning with a call. It shows both as analysis.
    """
    names = ("thinking", "reasoning_content", "reasoning")
    thinking = next((message[name] for name in names if message.get(name)), None)
    message = {name: value for name, value in message.items() if name not in names}
    if thinking is None:
        return message
    if message.get("tool_calls") and message["content"]:
        return {**message, "thinking": f"{thinking}\n\n{message['content']}", "content": ""}
    return {**message, "thinking": thinking}


def _one_by_one(
    message: Message, calls: Sequence[Any], results: Sequence[Message]
) -> list[Message]:
    """A message for each call, with the call's results after it; others follow in their order."""
    if len(calls) == 1:
        return [message, *results]
    found, left = list[Message](), list(results)
    ids = [call.get("id") for call in calls]
    for index, call in enumerate(calls):
        own = [one for one in left if one.get("tool_call_id") == ids[index] is not None]
        if not own and left and left[0].get("tool_call_id") not in ids:
            own = left[:1]  # without an id that says which call it is for
        left = [one for one in left if all(one is not other for other in own)]
        found += [{**message, "tool_calls": [call]}, *own]
        message = {"role": "assistant", "content": ""}
    return [*found, *left]


def harmony_tools(tools: list[Any] | None) -> list[Any] | None:
    """Tools whose functions and parameters all have a description, which may be empty."""
    return None if tools is None else [_described(tool) for tool in tools]


def _described(tool: Any) -> Any:
    function = tool["function"]
    schema = function.get("parameters")
    if isinstance(schema, Mapping) and isinstance(schema.get("properties"), Mapping):
        properties = {
            name: {"description": "", **part} if isinstance(part, Mapping) else part
            for name, part in schema["properties"].items()
        }
        function = {**function, "parameters": {**schema, "properties": properties}}
    if not function.get("description"):
        function = {**function, "description": ""}
    return {**tool, "function": function}


def check_effort(options: Mapping[str, Any]) -> None:
    """Raise if the reasoning effort is none that gpt-oss knows: the template takes any text."""
    if options.get("reasoning_effort") is not None:
        check_choice("reasoning_effort", options["reasoning_effort"], EFFORTS)
