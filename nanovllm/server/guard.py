"""Guard: checks hosts and API keys, and refuses new requests while the server drains."""

import asyncio
import contextlib
import hmac
import ipaddress
import socket
from collections.abc import Callable, Collection, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.openai.request_id import check_request_id
from nanovllm.server.clients import Clients, address_of
from nanovllm.server.errors import APIError, as_api_error, error_response
from nanovllm.server.limits import Limits
from nanovllm.server.log import CLIENT_LEFT, RequestLine
from nanovllm.server.messages.errors import KEY_HEADER
from nanovllm.server.named_field import NO_FIELDS, Fields
from nanovllm.server.options import ServerOptions
from nanovllm.utils.checks import shorten

# These need no key, and are polled or read by browsers.
OPEN_PATHS = (
    "/", "/health", "/ping", "/load", "/version", "/metrics", "/docs", "/openapi.json"
)  # fmt: skip
DRAINING_PATHS = ("/load", "/metrics", "/version")  # answered while the server drains


class Guard:
    """Passes requests on to an application, or refuses them.

    Each request has an id, in a header of the response, and a line in the log. Exceptions of the
    application become responses here. Web pages of these `origins` may use the server, and clients
    that know it by the names in `hosts`; None is any name. Requests that may do work are counted
    in `clients`. `fields_of` has the fields of bodies by path, for errors that name one.
    """

    def __init__(
        self,
        keys: Sequence[str],
        origins: Sequence[str],
        hosts: Collection[str] | None = None,
        clients: Clients | None = None,
        fields_of: Callable[[str], Fields] = lambda _: NO_FIELDS,
    ) -> None:
        self._keys, self._origins = [key.encode() for key in keys], origins
        self._hosts, self._fields_of = hosts, fields_of
        self.clients = Clients(Limits()) if clients is None else clients
        self.is_draining = False
        self.num_active = 0  # requests that are being answered

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application behind this guard."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                await self._log(app, scope, receive, send)
            else:
                await app(scope, receive, send)

        return guarded

    async def _log(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and write its line."""
        line = scope["line"] = RequestLine(scope)

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                line.status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()), (b"x-request-id", line.name.encode())
                ]  # fmt: skip
            await send(message)

        try:
            await self._answer(app, scope, receive, send_noted)
        except asyncio.CancelledError:  # by what runs the application
            line.status = CLIENT_LEFT
            raise
        finally:
            if line.url not in OPEN_PATHS or line.status != 200:
                line.write()

    async def _answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        line: RequestLine = scope["line"]
        try:
            headers = Headers(scope=scope)
            line.rename(_id_of(headers))
            self._check(line.url, scope["method"], headers)
            counts = scope["method"] == "POST" and line.url not in OPEN_PATHS
            line.key = self._key_of(headers)
            client = line.key or address_of(scope)
            request = self.clients.request(client) if counts else contextlib.nullcontext()
            self.num_active += 1
            try:
                with request as line.client:
                    await app(scope, receive, send)
            finally:
                self.num_active -= 1
        except Exception as error:
            if line.status is not None:  # the response has begun, and is cut off
                raise
            found = as_api_error(error)
            line.fail(found.status, str(found), found.code)
            response = error_response(found, line.url, self._fields_of(line.url))
            await response(scope, receive, send)

    def _check(self, path: str, method: str, headers: Headers) -> None:
        """Raise if a request is refused."""
        if self.is_draining and path not in DRAINING_PATHS:
            raise APIError(503, "the server is shutting down", "draining")
        host = headers.get("host")
        if self._hosts is not None and host is not None and not self._knows(host):
            raise APIError(
                403, f"{shorten(host)} is not a name of this server (--allowed-host)",
                "host_not_allowed",
            )  # fmt: skip
        origin = headers.get("origin")
        if origin is not None and method == "POST" and not self._admits(origin, headers):
            raise APIError(
                403, f"pages of {shorten(origin)} may not use this server (--cors-origin)",
                "origin_not_allowed",
            )  # fmt: skip
        if self._keys and path not in OPEN_PATHS and self._key_of(headers) is None:
            is_given = "authorization" in headers or KEY_HEADER in headers
            why = "this key is wrong" if is_given else "a key is needed"
            raise APIError(
                401, f"{why}: Authorization: Bearer KEY, or {KEY_HEADER}: KEY", "invalid_api_key"
            )

    def _knows(self, host: str) -> bool:
        """Whether the server has this name, which may have a port.

        A web page can let its site's name lead to the loopback address. The browser takes the
        server for that site then, and lets the page read all answers; but it sends the name.
        """
        name, _, port = host.lower().rpartition(":")
        name = (name if port.isdigit() else host.lower()).rstrip(".")
        return name in (self._hosts or ()) or name == "localhost" or _is_loopback(name.strip("[]"))

    def _admits(self, origin: str, headers: Headers) -> bool:
        """Whether a page of this origin may send a request with these headers.

        A browser asks before it sends JSON to another site (CORS), but not before it sends text.
        """
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        is_own = origin.partition("://")[2] == headers.get("host")
        is_known = origin in self._origins or "*" in self._origins
        return is_own or is_known or kind == "application/json"

    def _key_of(self, headers: Headers) -> bytes | None:
        """The API key of a request; None if it has none, or none of the server's."""
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = [key.strip()] if kind.lower() == "bearer" else []
        if (own := headers.get(KEY_HEADER)) is not None:
            given.append(own.strip())
        return next(filter(self._is_key, (one.encode("latin-1") for one in given)), None)

    def _is_key(self, given: bytes) -> bool:
        """Whether the bytes of a header, as they were sent, are a key of the server."""
        matches = [hmac.compare_digest(given, one) for one in self._keys]
        return any(matches)


def _id_of(headers: Headers) -> str | None:
    """The client's id of its request, which the answer and the log have; None without one."""
    name = headers.get("x-request-id")
    return None if name is None else check_request_id("X-Request-Id", name)


def known_hosts(options: ServerOptions) -> Collection[str] | None:
    """The names of the server in addition to those of the loopback address; None is any name.

    At a loopback address without keys, other names are those of sites that attack the server.
    """
    allowed = tuple(options.allowed_host or ())
    is_open = options.uds is None and not options.api_key and _is_local(options.host)
    if "*" in allowed or (not allowed and not is_open):
        return None
    return (*allowed, options.host.lower(), f"[{options.host.lower()}]")


def _is_local(host: str) -> bool:
    """Whether the name or address leads to the loopback address."""
    with contextlib.suppress(OSError):
        return _is_loopback(host) or _is_loopback(socket.gethostbyname(host))
    return False


def _is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False
