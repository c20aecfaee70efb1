"""The endpoints of responses: make one, read one, delete one."""

import functools
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nanovllm.server.answered import answered, json_response
from nanovllm.server.bodies import LONG, Bodies, parsed_in_pieces
from nanovllm.server.chats.api import ChatAPI
from nanovllm.server.errors import APIError
from nanovllm.server.limits import COST
from nanovllm.server.responses.events import ResponseForm
from nanovllm.server.responses.request import NAMES, parse_response, previous_id
from nanovllm.server.responses.store import ResponseStore
from nanovllm.utils.checks import shorten

RESPONSES = "/v1/responses"
MIB = 1 << 20
DEPTH = 16  # no stored message has as many lists and objects in one another


class Responses:
    """OpenAI's Responses API. A client's key owns its responses; without keys nobody does."""

    def __init__(self, chats: ChatAPI) -> None:
        self._chats, options = chats, chats.options
        self._bodies = Bodies(chats.llm.readers, options, self._stored_size)
        self._store = ResponseStore(
            options.max_responses, options.max_responses_mib * MIB, options.max_body_mib * MIB
        )

    @property
    def routes(self) -> list[Route]:
        """The routes of these endpoints."""
        return [
            Route(RESPONSES, self.create, methods=["POST"]),
            Route(RESPONSES + "/{name}", self.stored, methods=["GET", "DELETE"]),
        ]

    async def create(self, request: Request) -> Response:
        """Make a response."""
        parse = functools.partial(self._parse, request.scope["line"].key)
        return await answered(request, self._bodies, parse, self._chats.work)

    async def stored(self, request: Request) -> Response:
        """Send a stored response as it was, or drop it."""
        name, key = request.path_params["name"], request.scope["line"].key
        for option in request.query_params:
            raise APIError(400, f"unknown option {shorten(option)}: a response is sent as it was")
        found = self._store.get(key, name)
        if found is None:
            raise APIError(404, f"Response with id {shorten(name)} not found.")
        if request.method != "DELETE":
            return json_response(found.body)
        self._store.delete(key, name)
        return json_response({"id": name, "object": "response", "deleted": True})

    def _stored_size(self, request: Request, body: Mapping[str, Any]) -> int:
        """The bytes of the conversation that a body continues."""
        name = previous_id(body)
        found = name and self._store.get(request.scope["line"].key, name)
        return len(found.messages) if found else 0

    def _messages(self, data: bytes) -> Any:
        """The messages of a stored conversation, which may have as many values as a body."""
        most = self._chats.options.max_body_values
        if len(data) < LONG and COST // 2 * len(data) <= most:
            return orjson.loads(data)
        return parsed_in_pieces(data, most, DEPTH, "the stored conversation")

    def _parse(self, owner: Any, _: str, body: Mapping[str, Any]) -> ResponseForm:
        before: Any = []
        if (name := previous_id(body)) is not None:
            found = self._store.get(owner, name)
            if found is None:
                raise APIError(
                    404, f"Previous response with id {shorten(name)} not found.",
                    "previous_response_not_found",
                )  # fmt: skip
            before = self._messages(found.messages)
        parsed = parse_response(body, before, not self._store.is_off)
        asked = self._chats.parse(parsed.chat, NAMES)
        return ResponseForm(parsed, asked, self._chats.models.names[0], self._store, owner)
