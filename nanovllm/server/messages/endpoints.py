"""The endpoints of messages: answer one, and count the tokens of one."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nanovllm.chat.chat_format import tokenizer_template
from nanovllm.openai.request import APIRequest
from nanovllm.server.answered import answered
from nanovllm.server.bodies import Bodies
from nanovllm.server.chats.api import ChatAPI
from nanovllm.server.log import RequestLine
from nanovllm.server.messages.errors import PATH
from nanovllm.server.messages.events import MessageForm
from nanovllm.server.messages.request import NAMES, chat_of, counted_chat
from nanovllm.server.messages.thinking import chat_thinking


class Messages:
    """Anthropic's Messages API."""

    def __init__(self, chats: ChatAPI) -> None:
        self._chats, self._bodies = chats, Bodies(chats.llm.readers, chats.options)

    @property
    def routes(self) -> list[Route]:
        """The routes of these endpoints."""
        return [
            Route(PATH, self.create, methods=["POST"]),
            Route(f"{PATH}/count_tokens", self.count, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """Answer with a message."""
        return await answered(request, self._bodies, self._parse, self._chats.work)

    async def count(self, request: Request) -> Response:
        """The number of tokens in a message's prompt."""
        return await answered(request, self._bodies, self._parse_counted, self._counted)

    def _parse(self, _: str, body: Mapping[str, Any]) -> MessageForm:
        return MessageForm(self._asked(chat_of(body), body), self._chats.models.names[0])

    def _parse_counted(self, _: str, body: Mapping[str, Any]) -> APIRequest:
        return self._asked(counted_chat(body), body)

    def _asked(self, chat: Mapping[str, Any], body: Mapping[str, Any]) -> APIRequest:
        """The chat as a request. If its last message is an answer, the model goes on with it."""
        template = tokenizer_template(self._chats.llm.tokenizer, bool(chat["tools"]))
        thinking = chat_thinking(body.get("thinking"), template)
        last: Mapping[str, Any] = chat["messages"][-1] if chat["messages"] else {}
        continues = last.get("role") == "assistant"
        if continues and (not last["content"] or "tool_calls" in last):
            raise ValueError("messages: the last one must be the user's, or be text to go on with")
        chat = {**chat, **thinking, "continue_final_message": continues or None}
        return self._chats.parse(chat, NAMES)

    async def _counted(self, _: RequestLine, asked: APIRequest) -> dict[str, int]:
        return {"input_tokens": await self._chats.count(asked, NAMES)}
