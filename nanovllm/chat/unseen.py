"""Calls of tools, and their results, that a chat template would leave out of the prompt."""

from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.chat.template_names import names_in, reads_whole


def check_calls_seen(name: str, template: str) -> None:
    """Raise if the template shows no calls; `name` is the message that has some."""
    if "tool_calls" not in names_in(template) and not reads_whole(template):
        raise ValueError(
            f"{name}.tool_calls: the chat template reads no calls, so the model would not see them"
        )


def check_results_seen(
    place: str, conversation: list[Any], text: str, apply: Callable[[list[Any]], str]
) -> None:
    """Raise if no result of a tool has an effect on the `text` of the conversation at `place`.

    `apply` makes the text of a conversation. It is called for one with other results: templates
    that know no role tool may leave such messages out, or write them as they write all others.
    """
    indices = [index for index, message in enumerate(conversation) if message["role"] == "tool"]
    if indices and apply([_changed(message) for message in conversation]) == text:
        raise ValueError(
            f"{place}[{indices[0]}]: the chat template leaves out messages of the role tool, so the"
            " model would not see it"
        )


def _changed(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message, with another content if it is the result of a tool."""
    is_result = message["role"] == "tool"
    return {**message, "content": f"{message['content']}x"} if is_result else message
