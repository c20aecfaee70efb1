"""Client: requests to one server, on connections that are kept.

It uses asyncio's protocols, not its streams or a library: one callback reads and parses a piece of
an answer and takes its time, without a task that must be woken first. docs/serving.md has figures.
"""

import asyncio
import base64
import ssl
import time
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import unquote, urlsplit

from nanovllm import __version__
from nanovllm.bench.serve.response import BadResponseError, Head, ResponseReader

PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Address:
    """The server's address. Its paths begin with `path`, which has no slash at the end."""

    scheme: str
    host: str
    port: int
    path: str
    basic: str | None = None  # user and password, as a header has them

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Parse a base URL, with or without the `/v1` of the API."""
        parts = urlsplit(url)
        try:
            port = parts.port or PORTS[parts.scheme]
        except (ValueError, KeyError):  # a port that is no number, another scheme
            port = 0
        if not port or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"--base-url must be like http://127.0.0.1:8000, got {url!r}")
        user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        basic = base64.b64encode(user.encode()).decode() if parts.username else None
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.scheme, parts.hostname, port, path, basic)

    @property
    def authority(self) -> str:
        """Host and port, as a URL and the header `Host` have them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


class Receiver(Protocol):
    """Receives an answer: `receive` is called with the time whenever a part of it arrives."""

    def receive(self, now: float, head: Head, data: bytes) -> None:
        """Receive a part of the body. An exception ends the request."""


class Body:
    """A receiver that keeps the whole body."""

    def __init__(self) -> None:
        self.data = b""

    def receive(self, now: float, head: Head, data: bytes) -> None:  # noqa: ARG002
        self.data += data


class Connection(asyncio.Protocol):
    """A connection to the server, with at most one request at a time."""

    def __init__(self) -> None:
        self.was_used = False
        self.is_open = True
        self._transport: asyncio.Transport | None = None
        self._reader = ResponseReader()
        self._receiver: Receiver | None = None
        self._done: asyncio.Future[Head] | None = None

    async def send(self, request: bytes, receiver: Receiver) -> Head:
        """Send a request, and return when the whole answer has been received."""
        assert self._transport is not None and self._done is None
        self._reader, self._receiver = ResponseReader(), receiver
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._done
        finally:
            self._done, self.was_used = None, True
            if not self._reader.is_done:
                self.close()

    @property
    def has_answer(self) -> bool:
        """Whether a part of the answer to the last request has arrived."""
        return self._reader.head is not None

    def close(self) -> None:
        """Close the connection; an incomplete answer is dropped."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._done is None or self._done.done() or self._receiver is None:
            self.close()  # data without a request
            return
        reader = self._reader
        try:
            body = reader.feed(data)
            if body and reader.head is not None:
                self._receiver.receive(now, reader.head, body)
        except Exception as error:
            self._done.set_exception(error)
            self.close()
            return
        if reader.is_done:
            self._finish(reader)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._done is None or self._done.done():
            return
        try:
            self._reader.end()
        except BadResponseError as error:
            self._done.set_exception(exc or error)
            return
        self._finish(self._reader)

    def _finish(self, reader: ResponseReader) -> None:
        assert self._done is not None and reader.head is not None
        if not reader.head.keeps_alive:
            self.close()
        self._done.set_result(reader.head)


class Client:
    """Requests to one server. A connection is used again when its answer is complete."""

    def __init__(self, address: Address, api_key: str | None = None) -> None:
        self.address = address
        self._tls = ssl.create_default_context() if address.scheme == "https" else None
        self._idle: list[Connection] = []
        authorization = f"Basic {address.basic}" if address.basic else None
        if api_key is not None:
            authorization = f"Bearer {api_key}"
        self._headers = (
            f"Host: {address.authority}\r\nUser-Agent: nanovllm/{__version__}\r\n"
            + (f"Authorization: {authorization}\r\n" if authorization else "")
        )  # fmt: skip

    def request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """The bytes of a request; `body` is JSON."""
        head = f"{method} {self.address.path}{path} HTTP/1.1\r\n{self._headers}"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return f"{head}\r\n".encode() + (body or b"")

    async def send(self, request: bytes, receiver: Receiver) -> Head:
        """Send a request, and return when the whole answer has been received.

        A server may close an idle connection just when a request is sent on it. Then the request is
        sent again on a new one.
        """
        while True:
            connection = await self._connect()
            is_reused = connection.was_used
            try:
                head = await connection.send(request, receiver)
            except (BadResponseError, ConnectionError):
                if is_reused and not connection.has_answer:
                    continue
                raise
            if connection.is_open:
                self._idle.append(connection)
            return head

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        address, loop = self.address, asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                Connection, address.host, address.port, ssl=self._tls
            )
        except OSError as error:
            reason = error.strerror or error
            raise ConnectionError(f"cannot connect to {address}: {reason}") from None
        return connection
