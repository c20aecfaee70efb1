"""Exchange: one HTTP request and its response, as an ASGI application sees them."""

import asyncio
import http
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Scope

from nanovllm.server.errors import HEADERS, APIError, error_body
from nanovllm.server.limits import Limits
from nanovllm.server.wire import Wire

logger = logging.getLogger("nanovllm.server")
Headers = Sequence[tuple[bytes, bytes]]
HIGH_WATER = 1 << 16  # bytes of a body that are kept until the application takes them
BEGIN = b"HTTP/1.1 "  # of every response
CONTINUE = BEGIN + b"100 Continue\r\n\r\n"
NO_BODY = (204, 304)
STATUS = {one.value: b"%d %b\r\n" % (one.value, one.phrase.encode()) for one in http.HTTPStatus}


@dataclass(frozen=True)
class Service:
    """What all connections of a server share; `state` is uvicorn's, with its connections."""

    app: ASGIApp
    limits: Limits
    state: Any
    root_path: str
    keep_alive_seconds: float


class Exchange:
    """Hands a request to an application, and writes its response.

    `took` is called when the application has taken a part of the body, and `ended` when the
    response is complete.
    """

    def __init__(
        self,
        service: Service,
        wire: Wire,
        scope: Scope,
        expects_continue: bool,
        keep_alive: bool,
        took: Callable[[], None],
        ended: Callable[["Exchange"], None],
    ) -> None:
        self._service, self._wire, self._scope = service, wire, scope
        self._took, self._ended = took, ended
        self.keep_alive = keep_alive  # after the response another request may come
        self.more_body = True  # the end of the request has not come
        self.is_complete = False  # its response has been written
        self.has_begun = False  # the first line of the response has been written
        self._expects_continue = expects_continue
        self._body, self._news = bytearray(), asyncio.Event()
        self._error: APIError | None = None
        self._is_gone = False
        self._num_begun = 0  # bytes of the response that were written ahead of it
        self._head = b""  # written with the first part of the body
        self._has_body = self._is_chunked = False
        self._rest: int | None = None  # bytes to come, if the response has said how many

    @property
    def is_full(self) -> bool:
        """Whether the application must first take what has come of the body."""
        return len(self._body) > HIGH_WATER

    def feed(self, body: bytes) -> None:
        """Take a part of the request's body."""
        if not self.is_complete:
            self._body += body
            self._news.set()

    def end_body(self) -> None:
        """The request is complete."""
        self.more_body = False
        self._news.set()

    def fail(self, error: APIError) -> None:
        """Raise the error in the application when it next asks for the body."""
        self._error, self.keep_alive = error, False
        self._news.set()

    def leave(self) -> None:
        """Tell the application that the client has gone."""
        self._is_gone = True
        self._news.set()

    def begin(self) -> None:
        """Write one more byte of what every response begins with, to see whether it arrives."""
        if not self.has_begun and self._num_begun < len(BEGIN):
            self._wire.write(BEGIN[self._num_begun : self._num_begun + 1])
            self._num_begun += 1

    async def run(self) -> None:
        """Answer the request. A response that is not complete is cut off."""
        try:
            await self._service.app(self._scope, self.receive, self.send)
        except Exception as error:
            logger.error("an answer was cut off", exc_info=error)
        finally:
            if not self.is_complete and not self._is_gone:
                self._wire.close()

    async def receive(self) -> Message:
        """The next part of the body, or the client's leave."""
        if self._expects_continue and self.more_body and not self.has_begun:
            self._wire.write(CONTINUE)
        self._expects_continue = False
        if not self.is_complete and not self._is_gone:
            await self._news.wait()
            self._news.clear()
        if self.is_complete or self._is_gone:
            return {"type": "http.disconnect"}
        if self._error is not None:
            raise self._error
        body, self._body = bytes(self._body), bytearray()
        self._took()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """Write a part of the response, when the client has read enough of the one before."""
        if self._wire.is_paused:
            await self._wire.drain()
        if self._is_gone:
            return
        if message["type"] == "http.response.start":
            self._start(message["status"], message.get("headers", ()))
        else:
            self._write(message.get("body", b""), message.get("more_body", False))

    def _start(self, status: int, headers: Headers) -> None:
        """Make the head of the response."""
        self.has_begun = True
        length = dict(headers).get(b"content-length")
        self._has_body = self._scope["method"] != "HEAD" and status not in NO_BODY
        if self._has_body:
            self._rest = None if length is None else int(length)
            self._is_chunked = length is None and self._scope["http_version"] == "1.1"
            if length is None and not self._is_chunked:
                self.keep_alive = False  # the response ends with the connection
        if self._expects_continue and self.more_body:
            self.keep_alive = False  # whether the body will come is not known
        headers = [*self._service.state.default_headers, *headers]
        head = response_head(status, headers, self.keep_alive, self._is_chunked)
        self._head = head[self._num_begun :]

    def _write(self, body: bytes, more: bool) -> None:
        """Write a part of the response's body."""
        if self._rest is not None:
            self._rest -= len(body)
            if self._rest < 0 or (self._rest and not more):
                raise RuntimeError(f"a body has {-self._rest} more bytes than its content-length")
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            data = data if more else data + b"0\r\n\r\n"
        else:
            data = body if self._has_body else b""
        if self._head:
            data, self._head = self._head + data, b""
        self._wire.write(data)
        if not more:
            self.is_complete = True
            self._news.set()
            self._ended(self)


def response_head(status: int, headers: Headers, keep_alive: bool, is_chunked: bool) -> bytes:
    """The bytes of a response in front of its body."""
    lines = [BEGIN, STATUS.get(status) or b"%d \r\n" % status]
    for name, value in headers:
        lines += name, b": ", value, b"\r\n"
    if not keep_alive:
        lines.append(b"connection: close\r\n")
    if is_chunked:
        lines.append(b"transfer-encoding: chunked\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


def last_response(error: APIError, headers: Headers) -> bytes:
    """The whole response to a request that no application sees."""
    body = orjson.dumps(error_body(error))
    more = {"content-type": "application/json", "content-length": str(len(body))}
    more |= HEADERS.get(error.status, {})
    own = [(name.lower().encode(), value.encode()) for name, value in more.items()]
    return response_head(error.status, [*headers, *own], False, False) + body
