"""EventStream: a response of server-sent events, which ends when its client disconnects."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanovllm.server.errors import APIError, as_api_error, error_body
from nanovllm.server.gone import unless_gone
from nanovllm.server.log import CLIENT_LEFT, RequestLine

LAST_SECONDS = 1.0  # the time to send an error
DONE = b"data: [DONE]\n\n"
Part = tuple[bytes, bool]  # a part of a stream: events, and whether they are the last


def sse(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def error_event(error: APIError) -> bytes:
    """An error as the last event of a chat or a completion."""
    return sse(error_body(error))


class EventStream(Response):
    """A response that sends events as they come, and ends when the client disconnects.

    Its status is sent with the first event, so that an error before this can have another status.
    Of a later error, `failure` makes the last events.
    """

    def __init__(
        self,
        chunks: AsyncIterator[Part],
        timeout: float | None,
        line: RequestLine,
        failure: Callable[[APIError], bytes] = error_event,
    ) -> None:
        self._chunks, self._timeout, self._line = chunks, timeout, line
        self._failure = failure
        self.background = None
        self._begun = False

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            if not await unless_gone(receive, self._pump(send), self._timeout):
                self._line.status = CLIENT_LEFT
        except Exception as error:
            if not self._begun:  # then the error becomes the response
                raise
            with contextlib.suppress(asyncio.TimeoutError):  # the client does not read
                await asyncio.wait_for(self._end_with(as_api_error(error), send), LAST_SECONDS)

    async def _pump(self, send: Send) -> bool:
        """Send the events; True at the end."""
        async with aclosing(self._chunks) as chunks:  # type: ignore[type-var]
            async for chunk, is_last in chunks:
                if not self._begun:
                    self._line.record_first_token()
                    await self._begin(send)
                await send({"type": "http.response.body", "body": chunk, "more_body": not is_last})
        return True

    async def _begin(self, send: Send) -> None:
        self._begun = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx would collect events
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _end_with(self, error: APIError, send: Send) -> None:
        """Send an error as the last event."""
        self._line.fail(error.status, str(error), error.code)
        events = self._failure(error)
        await send({"type": "http.response.body", "body": events, "more_body": False})
