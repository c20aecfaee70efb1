"""Connection: reads the requests of one client, and bounds what they may use before any handler."""

import asyncio
import urllib.parse
from collections import deque
from typing import Any, NoReturn

import httptools
from starlette.types import Scope

from nanovllm.server.errors import APIError
from nanovllm.server.exchange import Exchange, Service, last_response
from nanovllm.server.log import RequestLine
from nanovllm.server.wire import Wire

KIB = 1 << 10
SLOWEST = KIB  # bytes of a body that must come in each second after `request_seconds`
MOST_PIPELINED = 32  # requests that are read before the first of them is answered
FRAMING = (b"content-length", b"transfer-encoding")  # headers that say where a body ends


class Connection(asyncio.Protocol):
    """Parses requests, and lets them be answered one after another.

    `_exchanges` are the requests that have been read, the last one perhaps in part; the first one
    is being answered. Nothing is read while others wait, or while a body waits for its handler.
    Without a parser, all that comes is dropped.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._limits = service, service.limits
        self._loop = asyncio.get_running_loop()
        self._parser: Any = httptools.HttpRequestParser(self)
        self._exchanges: deque[Exchange] = deque()
        self._reading: Exchange | None = None  # the request whose body is being read
        self._in_head = False  # a request has begun, and its headers have not ended
        self._clock: asyncio.TimerHandle | None = None  # until the client must have sent more
        self._began = 0.0  # when the time for the rest of a request began
        self._num_body = 0  # bytes of a body since then
        self._num_parsed = self._num_unparsed = 0  # bytes of headers; bytes without any result
        self._is_upgrade = self._is_replay = False
        self._error: APIError | None = None  # why a callback has stopped the parser
        self._is_paused = self._has_dropped = False

    # What asyncio calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._wire = Wire(transport, self._limits.unread_seconds)
        self._is_tls = transport.get_extra_info("sslcontext") is not None
        connections, most = self._service.state.connections, self._limits.max_connections
        if len(connections) >= most:
            words = f"the server has {most} connections (max_connections)"
            self._refuse(APIError(503, words, "too_many_connections"))
        else:
            connections.add(self)
            self._set_clock(self._limits.request_seconds, self._close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._service.state.connections.discard(self)
        self._parser = None
        self._stop_clock()
        self._wire.lose()
        for exchange in self._exchanges:
            exchange.leave()

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        if parser is None:
            self._has_dropped = True
            return
        self._num_unparsed += len(data)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_as_http(data[upgrade.args[0] :])
        except httptools.HttpParserInvalidMethodError:
            self._refuse(APIError(501, "the request's method is unknown", "unknown_method"))
        except httptools.HttpParserError as error:
            self._refuse(self._error or APIError(400, f"the request is not valid HTTP: {error}"))
        else:
            if self._num_unparsed > self._limits.max_header_kib * KIB:
                self._refuse(self._too_large())
        self._pause_or_resume()

    def eof_received(self) -> bool:
        """A client sends no more. Those that wait for answers to whole requests get them."""
        self._parser = None
        if self._exchanges and self._exchanges[-1].more_body:
            self._exchanges.pop().leave()
        if self._is_tls or not self._exchanges or self._wire.is_closing:
            return False  # which closes the connection
        self._stop_clock()
        self._exchanges[-1].keep_alive = False
        self._wire.watch(self._probe)
        return True

    def pause_writing(self) -> None:
        self._wire.pause()

    def resume_writing(self) -> None:
        self._wire.resume()

    # What uvicorn calls.

    def shutdown(self) -> None:
        """Close the connection, when requests that have come have been answered."""
        if self._exchanges:
            self._exchanges[-1].keep_alive = False
        else:
            self._close()

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._is_replay:
            return
        if len(self._exchanges) >= MOST_PIPELINED:
            self._read_no_more()
            raise ValueError  # which stops the parser
        self._url, self._headers = b"", list[tuple[bytes, bytes]]()
        self._in_head, self._num_parsed = True, 0
        self._restart_clock()

    def on_url(self, url: bytes) -> None:
        if not self._is_replay:
            self._count(len(url))
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_replay:
            return
        self._count(len(name) + len(value) + len(b": \r\n"))
        if self._in_head:  # else it comes after the body, and says nothing that is needed
            self._headers.append((name.lower(), value))
            if len(self._headers) > (most := self._limits.max_headers):
                self._stop(431, f"a request must have at most {most} headers (max_headers)")

    def on_headers_complete(self) -> None:
        if self._is_replay:
            return
        parser, version = self._parser, self._parser.get_http_version()
        self._check_head(version)
        self._is_upgrade = parser.should_upgrade()
        exchange = self._reading = Exchange(
            self._service, self._wire, self._scope(version),
            expects_continue=version == "1.1" and self._values(b"expect") == [b"100-continue"],
            keep_alive=version == "1.1" and parser.should_keep_alive(),
            took=self._pause_or_resume, ended=self._go_on,
        )  # fmt: skip
        self._in_head = False
        self._exchanges.append(exchange)
        if len(self._exchanges) == 1:
            self._run()

    def on_body(self, body: bytes) -> None:
        self._num_unparsed = 0
        self._num_body += len(body)
        if self._reading is not None:
            self._reading.feed(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade or self._reading is None:
            return  # its body has not been read
        exchange, self._reading, self._num_unparsed = self._reading, None, 0
        self._stop_clock()
        exchange.end_body()
        if not exchange.keep_alive:
            self._read_no_more()
        if exchange.is_complete:
            self._set_clock(self._service.keep_alive_seconds, self._close)

    # Requests.

    def _count(self, number: int) -> None:
        """Count bytes of the headers of a request, or of what follows its body."""
        self._num_unparsed = 0
        self._num_parsed += number
        if self._num_parsed > self._limits.max_header_kib * KIB:
            self._error = self._too_large()
            raise ValueError

    def _too_large(self) -> APIError:
        most = self._limits.max_header_kib
        words = f"the headers of a request must have at most {most} KiB (max_header_kib)"
        return APIError(431, words, "headers_too_large")

    def _stop(self, status: int, message: str) -> NoReturn:
        """Refuse a request from inside of a callback."""
        self._error = APIError(status, message)
        raise ValueError(message)  # which stops the parser

    def _values(self, name: bytes) -> list[bytes]:
        return [value.lower() for other, value in self._headers if other == name]

    def _check_head(self, version: str) -> None:
        """Refuse a request if it is not clear where it ends, or for which host it is."""
        if version not in ("1.0", "1.1"):
            self._stop(505, "the server speaks HTTP/1.1 and HTTP/1.0")
        num_hosts = len(self._values(b"host"))
        if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
            self._stop(400, f"a request must have one Host header, got {num_hosts}")
        encodings = self._values(b"transfer-encoding")
        if encodings and (encodings != [b"chunked"] or version == "1.0"):
            self._stop(501, "transfer-encoding must be chunked, and needs HTTP/1.1")

    def _scope(self, version: str) -> Scope:
        """The request as an ASGI application gets it."""
        root, info = self._service.root_path, self._info
        try:
            url = httptools.parse_url(self._url)
        except httptools.HttpParserInvalidURLError:
            self._stop(400, "the target of a request must be a path")
        path = url.path or b"/"
        return {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version, "method": self._parser.get_method().decode(),
            "scheme": "https" if self._is_tls else "http", "root_path": root,
            "path": root + urllib.parse.unquote(path.decode()), "raw_path": root.encode() + path,
            "query_string": url.query or b"", "headers": self._headers,
            "client": info("peername"), "server": info("sockname"),
        }  # fmt: skip

    def _info(self, name: str) -> tuple[str, int | None] | None:
        """An address of this connection."""
        found = self._transport.get_extra_info(name)
        if isinstance(found, tuple):
            return found[0], found[1]
        return (found, None) if name == "sockname" and isinstance(found, str) else None

    def _read_as_http(self, rest: bytes) -> None:
        """Read a request that asks for another protocol as one that does not.

        The parser ends behind its headers. A new one reads the body, and needs to know how.
        """
        self._parser, self._is_upgrade = httptools.HttpRequestParser(self), False
        framing = [one for one in self._headers if one[0] in FRAMING]
        self._is_replay = True
        try:
            self._parser.feed_data(b"POST / HTTP/1.1\r\n")
            for header in framing:
                self._parser.feed_data(b"%b: %b\r\n" % header)
            self._parser.feed_data(b"\r\n")
        finally:
            self._is_replay = False
        if rest:
            self.data_received(rest)

    # The order of answers.

    def _run(self) -> None:
        """Answer the first request."""
        tasks = self._service.state.tasks
        task = self._loop.create_task(self._exchanges[0].run())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _go_on(self, exchange: Exchange) -> None:
        """Read or answer the next request, or close the connection, after an answer."""
        self._exchanges.popleft()
        if not exchange.keep_alive:
            self._close(lingers=exchange.more_body or self._has_dropped)
        elif self._exchanges:
            self._run()
        elif exchange.more_body:  # the rest of the request is dropped
            self._set_clock(self._limits.request_seconds, self._close)
        elif not self._in_head:
            self._set_clock(self._service.keep_alive_seconds, self._close)
        self._pause_or_resume()

    def _probe(self) -> None:
        if self._exchanges:
            self._exchanges[0].begin()

    def _close(self, lingers: bool = False) -> None:
        self._parser = None
        self._stop_clock()
        self._wire.close(lingers)

    def _read_no_more(self) -> None:
        """Answer what has been read, and then close the connection."""
        self._parser = None
        self._exchanges[-1].keep_alive = False

    def _refuse(self, error: APIError) -> None:
        """Answer what has been read before, then the request that is being read; and close."""
        self._has_dropped = True
        if self._parser is None:
            return  # it comes after the last request
        self._parser = None
        self._stop_clock()
        if self._reading is not None:
            if not self._reading.has_begun:
                self._reading.fail(error)
            elif self._reading.is_complete:
                self._close(lingers=True)
            else:
                self._transport.abort()
        elif self._exchanges:
            self._exchanges[-1].keep_alive = False
        else:
            line = RequestLine({"path": "-"})
            line.fail(error.status, str(error), error.code)
            name = (b"x-request-id", line.name.encode())
            self._wire.write(last_response(error, [*self._service.state.default_headers, name]))
            self._close(lingers=True)
            line.write()

    # Time, and the flow of bytes.

    def _pause_or_resume(self) -> None:
        """Read only if what has been read is being answered."""
        first = self._exchanges[0] if self._exchanges else None
        is_full = len(self._exchanges) > 1 or (first is not None and first.is_full)
        if is_full == self._is_paused or self._transport.is_closing():
            return
        if is_full:
            self._transport.pause_reading()
        elif self._parser is not None or self._wire.is_closing:
            self._transport.resume_reading()
            if self._clock is not None and (self._in_head or self._reading is not None):
                self._restart_clock()
        self._is_paused = is_full

    def _restart_clock(self) -> None:
        """Give the client time for a request, or for the rest of one."""
        self._began, self._num_body = self._loop.time(), 0
        self._set_clock(self._limits.request_seconds, self._check_time)

    def _check_time(self) -> None:
        """Refuse a request that comes too slowly."""
        seconds = self._limits.request_seconds
        more = self._began + seconds + self._num_body / SLOWEST - self._loop.time()
        if self._is_paused or (more > 0 and self._reading is not None):
            self._set_clock(seconds if self._is_paused else more, self._check_time)
        else:
            words = f"a request must be complete within {seconds:g} s (request_seconds)"
            self._refuse(APIError(408, words, "request_too_slow"))

    def _set_clock(self, seconds: float, call: Any) -> None:
        self._stop_clock()
        self._clock = self._loop.call_later(seconds, call)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
