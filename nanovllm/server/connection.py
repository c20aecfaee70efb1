"""Connection: reads the requests of one client, and bounds what they may use before any handler."""

import asyncio
from collections import deque
from typing import Any

from starlette.types import Scope

from nanovllm.server.errors import APIError
from nanovllm.server.exchange import Exchange, Service, last_response
from nanovllm.server.log import RequestLine
from nanovllm.server.request_parser import Head, RequestParser
from nanovllm.server.wire import Wire

SLOWEST = 1 << 10  # bytes of a body that must come in each second after `request_seconds`
MOST_PIPELINED = 32  # requests that are read before the first of them is answered


class Connection(asyncio.Protocol):
    """Reads requests, and lets them be answered one after another.

    `_exchanges` are the requests that have been read, the last one perhaps in part; the first one
    is being answered. Nothing is read while others wait, or while a body waits for its handler.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._limits = service, service.limits
        self._loop = asyncio.get_running_loop()
        self._parser = RequestParser(self._limits, self)
        self._exchanges: deque[Exchange] = deque()
        self._reading: Exchange | None = None  # the request whose body is being read
        self._refused: APIError | None = None  # the answer after those to `_exchanges`
        self._clock: asyncio.TimerHandle | None = None  # until the client must have sent more
        self._began = 0.0  # when the time for the rest of a request began
        self._num_body = 0  # bytes of a body since then
        self._is_paused = False

    # What asyncio calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._wire = Wire(transport, self._limits.unread_seconds)
        self._is_tls = transport.get_extra_info("sslcontext") is not None
        self._client = _address(transport.get_extra_info("peername"))
        self._server = _address(transport.get_extra_info("sockname"))
        connections, most = self._service.state.connections, self._limits.max_connections
        if len(connections) >= most:
            words = f"the server has {most} connections (max_connections)"
            self._refuse(APIError(503, words, "too_many_connections"))
        else:
            connections.add(self)
            self._set_clock(self._limits.request_seconds, self._close)

    def connection_lost(self, _: Exception | None) -> None:
        self._service.state.connections.discard(self)
        self._parser.end()
        self._stop_clock()
        self._wire.lose()
        self._reading = self._refused = None
        while self._exchanges:
            self._exchanges.pop().leave()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed(data)
        except APIError as error:
            self._refuse(error)
        self._pause_or_resume()

    def eof_received(self) -> bool:
        """A client sends no more. Those that wait for answers to whole requests get them."""
        self._parser.is_over = True
        if self._exchanges and self._exchanges[-1].more_body:
            self._exchanges.pop().leave()
        if self._is_tls or not self._exchanges or self._wire.is_closing:
            return False  # which closes the connection
        self._stop_clock()
        if self._refused is None:
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

    def begin_request(self) -> bool:
        """Whether one more request is read; after the last one the connection ends."""
        if len(self._exchanges) >= MOST_PIPELINED:
            self._exchanges[-1].keep_alive = False
            return False
        self._restart_clock()
        return True

    def take_head(self, head: Head) -> None:
        """Begin to answer the request, or let it wait for those before it."""
        exchange = self._reading = Exchange(
            self._service, self._wire, self._scope(head),
            expects_continue=head.wants_continue, keep_alive=head.keep_alive,
            took=self._pause_or_resume, ended=self._go_on,
        )  # fmt: skip
        self._exchanges.append(exchange)
        if len(self._exchanges) == 1:
            self._run()

    def take_body(self, body: bytes) -> None:
        """Hand a part of the body to the request's handler."""
        self._num_body += len(body)
        if self._reading is not None:
            self._reading.feed(body)

    def end_request(self) -> None:
        """The request that was being read is complete."""
        exchange, self._reading = self._reading, None
        self._stop_clock()
        if exchange is not None:
            exchange.end_body()
            self._parser.is_over = not exchange.keep_alive
            if exchange.is_complete:
                self._set_clock(self._service.keep_alive_seconds, self._close)

    def _scope(self, head: Head) -> Scope:
        """The request as an ASGI application gets it."""
        root = self._service.root_path
        return {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version, "method": head.method,
            "scheme": "https" if self._is_tls else "http", "root_path": root,
            "path": root + head.path, "raw_path": root.encode() + head.raw_path,
            "query_string": head.query, "headers": head.headers,
            "client": self._client, "server": self._server,
        }  # fmt: skip

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
            self._close(lingers=exchange.more_body or self._parser.has_dropped)
        elif self._exchanges:
            self._run()
        elif self._refused is not None:
            self._refuse(self._refused)
        elif exchange.more_body:  # the rest of the request is dropped
            self._set_clock(self._limits.request_seconds, self._close)
        elif not self._parser.in_head:
            self._set_clock(self._service.keep_alive_seconds, self._close)
        self._pause_or_resume()

    def _probe(self) -> None:
        if self._exchanges:
            self._exchanges[0].begin()

    def _close(self, lingers: bool = False) -> None:
        self._parser.is_over = True
        self._stop_clock()
        self._wire.close(lingers)

    def _refuse(self, error: APIError) -> None:
        """Answer what has been read before, then the request that is being read; and close."""
        self._parser.is_over = self._parser.has_dropped = True
        self._stop_clock()
        if self._reading is not None:
            if not self._reading.has_begun:
                self._reading.fail(error)
            elif self._reading.is_complete:
                self._close(lingers=True)
            else:
                self._transport.abort()
        elif self._exchanges:
            self._refused = error
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
        elif self._parser.is_over and not self._wire.is_closing:
            return  # what still comes is dropped after the last answer
        else:
            self._transport.resume_reading()
            if self._clock is not None and (self._parser.in_head or self._reading is not None):
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


def _address(found: Any) -> tuple[str, int | None] | None:
    """An address as ASGI has it: a host and a port, or the path of a Unix socket."""
    if isinstance(found, tuple):
        return found[0], found[1]
    return (found, None) if isinstance(found, str) and found else None
