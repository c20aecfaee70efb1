"""What raw sockets send to a server, and what they get: framing, limits, time, clients that leave.

The application is a small one. Each test runs on asyncio's event loop and on uvloop.
"""

import asyncio
import contextlib
import gc
import logging
import re
import socket
import ssl
import weakref
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import LIMIT

from nanovllm.server import connection, wire
from nanovllm.server.connection import MOST_PIPELINED, Connection
from nanovllm.server.exchange import Service
from nanovllm.server.guard import Guard
from nanovllm.server.http_server import HTTPServer
from nanovllm.server.options import ServerOptions

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
SHORT, LONG = 0.1, 60.0  # seconds
CHUNKS = b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"


def get(path: str = "/", version: str = "1.1") -> bytes:
    return f"GET {path} HTTP/{version}\r\nHost: x\r\n\r\n".encode()


class Server:
    """A server with a small application, and what that has seen."""

    def __init__(self, **options: Any) -> None:
        keep_alive_seconds = options.pop("keep_alive_seconds", LONG)
        self.requests: list[tuple[str, bytes]] = []  # paths and bodies
        self.num_left = self.num_waiting = 0
        self.go_on = asyncio.Event()
        state = SimpleNamespace(connections=set(), tasks=set(), default_headers=[(b"date", b"now")])
        asked = ServerOptions(**{"request_seconds": LONG, **options})
        guarded: Any = Guard((), ()).around(self._answer)
        self.service = Service(guarded, asked, state, "", keep_alive_seconds)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more and scope["path"] != "/early":
            message = await receive()
            if message["type"] == "http.disconnect":
                self.num_left += 1
                return
            body, more = body + message["body"], message["more_body"]
        self.requests.append((f"{scope['method']} {scope['path']}", body))
        left = asyncio.ensure_future(receive())
        try:
            await self._respond(scope["path"], left, send)
        finally:
            left.cancel()

    async def _respond(self, path: str, left: "asyncio.Future[Any]", send: Any) -> None:
        async def write(body: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        headers = [(b"content-length", b"5")] if path in ("/early", "/whole", "/longer") else []
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        if path == "/wait":
            self.num_waiting += 1
            waiting = asyncio.ensure_future(self.go_on.wait())
            await asyncio.wait({left, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        await send(start)
        while path == "/endless" and not left.done():
            await write(bytes(1 << 16))
            await asyncio.sleep(0)
        self.num_left += left.done()
        if headers:
            await write(b"whole" if path != "/longer" else b"longer", more=False)
        else:
            for part in (b"ab", b"c"):
                await write(part)
            await write(b"", more=False)


class Client:
    """A client's socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer, self._reader = writer, reader
        self.send, self.end = writer.write, writer.write_eof

    async def read(self) -> bytes:
        """All that comes until the server closes the connection."""
        return await asyncio.wait_for(self._reader.read(), LIMIT)

    async def read_to(self, end: bytes) -> bytes:
        return await asyncio.wait_for(self._reader.readuntil(end), LIMIT)

    @property
    def has_answer(self) -> bool:
        return b"HTTP/1.1 4" in self._reader._buffer  # type: ignore[attr-defined]

    def leave(self) -> None:
        self.writer.close()


Connect = Callable[[], Coroutine[Any, Any, Client]]
Talk = Callable[[Server, Connect], Coroutine[Any, Any, None]]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Run a conversation with a server that has these options."""
    run_loop = pytest.importorskip(request.param).run

    async def talk_to(talk: Talk, options: dict[str, Any]) -> None:
        server = Server(**options)
        listener = socket.create_server(("127.0.0.1", 0))
        loop = asyncio.get_running_loop()
        async with await loop.create_server(lambda: Connection(server.service), sock=listener):
            clients = []

            async def connect() -> Client:
                client = Client(*await asyncio.open_connection(*listener.getsockname()))
                clients.append(client)
                return client

            await asyncio.wait_for(talk(server, connect), LIMIT)
            for client in clients:
                client.leave()
            await until(lambda: not server.service.state.connections)

    return lambda talk, **options: run_loop(talk_to(talk, options))


async def until(check: Callable[[], Any]) -> None:
    async def poll() -> None:
        while not check():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(poll(), LIMIT)


def statuses(data: bytes) -> list[int]:
    return [int(one) for one in re.findall(rb"HTTP/1\.1 (\d+) ", data)]


BAD: list[tuple[bytes, int, str]] = [
    (b"GET / HTTP/1.1\r\n\r\n", 400, "must have one Host header, got 0"),
    (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400, "must have one Host header, got 2"),
    (b"GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", 400, "must have one Host header, got 2"),
    (HEAD + b"Content-Length: -1\r\n\r\n", 400, "Content-Length"),
    (HEAD + b"Content-Length: 1x\r\n\r\n", 400, "Content-Length"),
    (HEAD + b"Content-Length: 0x1\r\n\r\n", 400, "Content-Length"),
    (HEAD + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\na", 400, "Content-Length"),
    (HEAD + b"Content-Length: %d\r\n\r\n" % 10**30, 400, "Content-Length"),
    (HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS, 400, "Transfer-"),
    (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n" + CHUNKS, 400, "Content-L"),
    (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS, 501, "must be chunked"),
    (HEAD + b"Transfer-Encoding: identity\r\n\r\n", 501, "must be chunked"),
    (
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS, 501,
        "transfer-encoding must be chunked, and needs HTTP/1.1",
    ),
    (CHUNKED + b"f" * 30 + b"\r\n", 400, "not valid HTTP: Chunk size overflow"),
    (CHUNKED + b"2\r\nabc", 400, "not valid HTTP"),
    (CHUNKED + b"0\r\n" + b"Trailer: x\r\n" * 99, 431, "at most 1 KiB (max_header_kib)"),
    (HEAD + b"X: " + b"x" * 9999 + b"\r\n\r\n", 431, "at most 1 KiB (max_header_kib)"),
    (b"GET /" + b"x" * 9999, 431, "at most 1 KiB (max_header_kib)"),
    (HEAD + b"X: x\r\n" * 9 + b"\r\n", 431, "at most 9 headers (max_headers)"),
    (HEAD + b"X : x\r\n\r\n", 400, "not valid HTTP"),
    (HEAD + b"X: x\r\n y\r\n\r\n", 400, "not valid HTTP"),
    (b"GET / HTTP/1.1\nHost: x\n\n", 400, "not valid HTTP"),
    (b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n", 501, "the request's method is unknown"),
    (b"\x16\x03\x01\x02\x00\x01\x00", 501, "the request's method is unknown"),  # TLS
    (b"GET /\r\n\r\n", 505, "speaks HTTP/1.1 and HTTP/1.0"),
    (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505, "speaks HTTP/1.1 and HTTP/1.0"),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "not valid HTTP"),
    (b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n", 400, "must be a path"),
    (b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n", 400, "must be a path"),
    (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400, "not valid HTTP"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "status", "words"), BAD)
def test_a_bad_request_gets_an_error_and_the_connection_ends(
    run: Any, data: bytes, status: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each has one line in the log, with the id that its response has."""

    async def talk(server: Server, connect: Connect) -> None:
        client = await connect()
        client.send(data)
        answer = await client.read()
        assert statuses(answer) == [status] and words.encode() in answer
        assert b"\r\nconnection: close\r\n" in answer
        assert server.requests == []
        name = re.search(rb"x-request-id: (\w+)", answer)
        assert name is not None
        (line,) = [one.getMessage() for one in caplog.records if name[1].decode() in str(one.args)]
        assert f" {status} " in line

    caplog.set_level(logging.INFO, "nanovllm.server")
    run(talk, max_header_kib=1, max_headers=9)


@pytest.mark.parametrize(
    "start", [HEAD + b"X: ", HEAD + b"X", b"GET /", CHUNKED + b"1;", CHUNKED + b"0\r\nX: "]
)
def test_what_never_ends_is_read_up_to_the_limit(run: Any, start: bytes) -> None:
    """In pieces, so that no parser joins what came before with each of them."""

    async def talk(server: Server, connect: Connect) -> None:
        client, sent = await connect(), len(start)
        client.send(start)
        with contextlib.suppress(ConnectionError):
            while sent < 8000 and not client.has_answer:
                client.send(b"x" * 512)
                await client.writer.drain()
                sent += 512
                await asyncio.sleep(0.001)
        assert sent < 8000

    run(talk, max_header_kib=2)


def test_headers_within_the_limits_are_taken(run: Any) -> None:
    async def talk(server: Server, connect: Connect) -> None:
        client = await connect()
        client.send(HEAD + b"X: %b\r\n" % (b"x" * 50_000) + b"Y: y\r\n" * 198 + b"\r\n")
        assert b" 200 OK" in await client.read_to(b"0\r\n\r\n")

    run(talk)


@pytest.mark.parametrize(
    ("data", "requests"),
    [
        (HEAD + b"Content-Length: 2\r\n\r\nab", [("POST /", b"ab")]),
        (CHUNKED + CHUNKS, [("POST /", b"abc")]),
        (CHUNKED + b"2;a=b\r\nab\r\n0\r\nTrailer: x\r\n\r\n", [("POST /", b"ab")]),
        (b"\r\n\r\n" + get(), [("GET /", b"")]),
        (b"GET http://y/a%20b?q HTTP/1.1\r\nHost: x\r\n\r\n", [("GET /a b", b"")]),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", [("OPTIONS *", b"")]),
        (b"PROPFIND / HTTP/1.1\r\nHost: x\r\n\r\n", [("PROPFIND /", b"")]),
        (b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
         b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n", [("GET /", b"")]),
        (HEAD + UPGRADE + b"Content-Length: 2\r\n\r\nab", [("POST /", b"ab")]),
        (HEAD + UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS, [("POST /", b"abc")]),
        (HEAD + UPGRADE + b"Content-Length: 2\r\n\r\nab" + get(), [("POST /", b"ab"),
                                                                   ("GET /", b"")]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("piece", [1, 1 << 16])
def test_requests_are_answered_whatever_they_ask_for(
    run: Any, data: bytes, requests: Any, piece: int
) -> None:
    """Those that ask for another protocol, too; their bodies are read. In pieces of all sizes."""

    async def talk(server: Server, connect: Connect) -> None:
        client = await connect()
        client.writer.get_extra_info("socket").setsockopt(socket.SOL_TCP, socket.TCP_NODELAY, 1)
        for place in range(0, len(data), piece):
            client.send(data[place : place + piece])
            await asyncio.sleep(0)
        for _ in requests:
            answer = await client.read_to(b"0\r\n\r\n")
            assert statuses(answer) == [200] and answer.endswith(b"\r\n\r\n" + CHUNKS)
        client.send(get("/last"))  # the connection is still of use
        await client.read_to(b"0\r\n\r\n")
        assert server.requests == [*requests, ("GET /last", b"")]

    run(talk)


@pytest.mark.parametrize("keeps", [b"", b"Connection: keep-alive\r\n"])
def test_clients_of_http_1_0_get_no_chunks(run: Any, keeps: bytes) -> None:
    """The end of the connection is that of the answer, unless its length is known."""

    async def talk(server: Server, connect: Connect) -> None:
        for path, body in ((b"/", b"abc"), (b"/whole", b"whole")):
            client = await connect()
            client.send(b"GET %b HTTP/1.0\r\n%b\r\n" % (path, keeps))
            head, _, rest = (await client.read()).partition(b"\r\n\r\n")
            assert rest == body and b"chunked" not in head and b"connection: close" in head

    run(talk)


def test_a_head_has_no_body(run: Any) -> None:
    async def talk(server: Server, connect: Connect) -> None:
        for path in (b"/", b"/whole"):
            client = await connect()
            client.send(b"HEAD %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path)
            answer = await client.read()
            assert answer.endswith(b"\r\n\r\n") and b"chunked" not in answer
            assert (b"content-length: 5" in answer) == (path == b"/whole")

    run(talk)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []), (b"\r\n\r\n", []), (b"GE", [408]), (HEAD, [408]), (HEAD + b"X: x", [408]),
        (HEAD + b"Content-Length: 9\r\n\r\n", [408]), (CHUNKED + b"2\r\na", [408]),
        (get() + HEAD, [200, 408]), (get("/early").replace(b"\r\n\r\n", b"\r\nContent-Length: 9"
                                                          b"\r\n\r\n"), [200]),
    ],
)  # fmt: skip
def test_a_request_that_does_not_come_ends_the_connection(
    run: Any, data: bytes, expected: list[int]
) -> None:
    """With status 408, if some of it has come and it was not answered before."""

    async def talk(server: Server, connect: Connect) -> None:
        client = await connect()
        client.send(data)
        answer = await client.read()
        assert statuses(answer) == expected
        if 408 in expected:
            assert b"within 0.1 s (request_seconds)" in answer

    run(talk, request_seconds=SHORT)


def test_a_body_may_be_slow_and_not_stand_still(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(server: Server, connect: Connect) -> None:
        client = await connect()
        client.send(HEAD + b"Content-Length: 20\r\n\r\n")
        for _ in range(20):
            client.send(b"x")
            await asyncio.sleep(SHORT / 5)
        assert statuses(await client.read_to(b"\r\n\r\n")) == [200]

    monkeypatch.setattr(connection, "SLOWEST", 1)
    run(talk, request_seconds=SHORT)


def test_idle_connections_are_kept_for_some_time(run: Any) -> None:
    async def talk(server: Server, connect: Connect) -> None:
        client = await connect()
        for _ in range(2):
            client.send(get())
            await client.read_to(b"0\r\n\r\n")
        client.send(b"\r\n")  # which is no request
        assert await client.read() == b""

    run(talk, keep_alive_seconds=SHORT, request_seconds=2 * SHORT)


def test_connections_have_a_limit(run: Any) -> None:
    async def talk(server: Server, connect: Connect) -> None:
        first = await connect()
        first.send(get())
        await first.read_to(b"0\r\n\r\n")
        for _ in range(3):
            client = await connect()
            client.send(get())
            answer = await client.read()
            assert statuses(answer) == [503] and b"1 connections (max_connections)" in answer
            assert b"retry-after: 1" in answer
        first.leave()
        await until(lambda: not server.service.state.connections)
        again = await connect()
        again.send(get())
        await again.read_to(b"0\r\n\r\n")

    run(talk, max_connections=1)


@pytest.mark.parametrize("number", [1, 2])
def test_a_client_that_sends_no_more_gets_its_answers(run: Any, number: int) -> None:
    async def talk(server: Server, connect: Connect) -> None:
        client = await connect()
        client.send(number * get("/wait"))
        client.end()
        await until(lambda: server.num_waiting)
        await asyncio.sleep(SHORT)  # during which it is not taken for one that has left
        server.go_on.set()
        answer = await client.read()
        heads = answer.split(b"\r\n\r\n" + CHUNKS)
        assert heads.pop() == b"" and len(heads) == number
        assert all(re.fullmatch(rb"HTTP/1\.1 200 OK\r\n[^/]*", head) for head in heads), answer
        assert server.num_left == 0

    run(talk)


@pytest.mark.parametrize("path", ["/wait", "/endless"])
@pytest.mark.parametrize("is_half_closed", [False, True])
def test_a_client_that_leaves_is_noticed(
    run: Any, path: str, is_half_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after it has ended its side; then its system says so when the server writes."""

    async def talk(server: Server, connect: Connect) -> None:
        client = await connect()
        client.send(get(path))
        if is_half_closed:
            client.end()
        await until(lambda: server.requests)
        await asyncio.sleep(SHORT / 10)
        client.leave()
        await until(lambda: server.num_left)

    run(talk)


def test_half_a_request_has_no_answer(run: Any) -> None:
    async def talk(server: Server, connect: Connect) -> None:
        for data in (b"GE", HEAD, HEAD + b"Content-Length: 9\r\n\r\na"):
            client = await connect()
            client.send(data)
            client.end()
            assert await client.read() == b""
        client = await connect()
        client.send(get() + HEAD + b"Content-Length: 9\r\n\r\n")
        client.end()
        assert statuses(await client.read()) == [200]
        assert server.requests == [("GET /", b"")]

    run(talk)


def test_a_client_that_reads_nothing_is_left(run: Any) -> None:
    """And one that reads slowly is not."""

    async def talk(server: Server, connect: Connect) -> None:
        client = await connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(get("/endless"))
        await until(lambda: server.num_left)

    run(talk, unread_seconds=SHORT)


def test_pipelined_requests_are_answered_in_order(run: Any) -> None:
    async def talk(server: Server, connect: Connect) -> None:
        client = await connect()
        client.send(get("/1") + CHUNKED + CHUNKS + get("/3"))
        for _ in range(3):
            await client.read_to(b"0\r\n\r\n")
        assert [path for path, _ in server.requests] == ["GET /1", "POST /", "GET /3"]

    run(talk)


def test_few_pipelined_requests_are_read_ahead(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the most that are read the connection ends; what was read has answers."""

    async def talk(server: Server, connect: Connect) -> None:
        client = await connect()
        client.send(get("/wait") + get() * 3000)
        await until(lambda: server.num_waiting)
        (only,) = server.service.state.connections
        client.send(get() * 500_000)
        await asyncio.sleep(SHORT)
        assert len(only._exchanges) == MOST_PIPELINED
        assert client.writer.transport.get_write_buffer_size() > 0, "the server reads on"
        server.go_on.set()
        assert statuses(await client.read()) == [200] * MOST_PIPELINED

    monkeypatch.setattr(wire, "LINGER_SECONDS", SHORT)
    run(talk)


def test_a_client_may_wait_until_its_body_is_wanted(run: Any) -> None:
    async def talk(server: Server, connect: Connect) -> None:
        client = await connect()
        client.send(HEAD + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert await client.read_to(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"ab")
        await client.read_to(b"0\r\n\r\n")
        assert server.requests == [("POST /", b"ab")]
        unwanted = HEAD.replace(b"/ ", b"/early ")
        client.send(unwanted + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        answer = await client.read()
        assert statuses(answer) == [200] and b"connection: close" in answer

    run(talk)


def test_a_handler_that_takes_its_time_stops_the_client(run: Any) -> None:
    """No more of a body is kept than the high-water mark and one read."""

    async def talk(server: Server, connect: Connect) -> None:
        client = await connect()
        client.send(get("/wait") + HEAD + b"Content-Length: 30000000\r\n\r\n")
        client.send(bytes(30_000_000))
        await until(lambda: server.num_waiting)
        await asyncio.sleep(2 * SHORT)  # the time for the body does not run
        assert client.writer.transport.get_write_buffer_size() > 0
        server.go_on.set()
        await client.read_to(b"0\r\n\r\n")
        await client.read_to(b"0\r\n\r\n")
        assert len(server.requests[1][1]) == 30_000_000

    run(talk, request_seconds=SHORT)


def test_a_server_that_ends_closes_idle_connections_first(run: Any) -> None:
    async def talk(server: Server, connect: Connect) -> None:
        idle, busy = await connect(), await connect()
        busy.send(get("/wait"))
        await until(lambda: server.num_waiting)
        for one in list(server.service.state.connections):
            one.shutdown()
        assert await idle.read() == b""
        server.go_on.set()
        assert b"connection: close" in await busy.read()

    run(talk)


def test_a_handshake_that_does_not_come_ends_the_connection() -> None:
    """The context has no certificate, which would only be needed later."""

    async def talk() -> bytes:
        server = HTTPServer(lambda *_: None, ServerOptions(request_seconds=SHORT))  # type: ignore
        server.config.load()
        server.config.ssl = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        listener = socket.create_server(("127.0.0.1", 0))
        await server.startup([listener])
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        data = await asyncio.wait_for(reader.read(), LIMIT)
        writer.close()
        for one in server.servers:
            one.close()
        return data

    assert asyncio.run(talk()) == b""


@pytest.mark.parametrize("is_half_closed", [False, True])
def test_a_bad_request_is_answered_after_those_before_it(run: Any, is_half_closed: bool) -> None:
    """Also if it was read while they were being answered."""

    async def talk(server: Server, connect: Connect) -> None:
        client = await connect()
        client.send(get("/wait") + b"BREW / HTTP/1.1\r\n")
        await until(lambda: server.num_waiting)
        if is_half_closed:
            client.end()
            await asyncio.sleep(SHORT / 5)
        server.go_on.set()
        assert statuses(await client.read()) == [200, 501]

    run(talk)


def test_the_last_answer_arrives_whatever_the_client_still_sends(run: Any) -> None:
    """The rest is read and dropped: a system resets a connection that is closed before."""

    async def talk(server: Server, connect: Connect) -> None:
        client = await connect()
        client.send(get("/wait") + get() + HEAD.replace(b"Host", b"Host "))
        await until(lambda: server.num_waiting)
        client.send(bytes(1 << 22))
        server.go_on.set()
        assert statuses(await client.read()) == [200, 200, 400]
        await client.writer.drain()

    run(talk)


def test_spaces_around_the_value_of_a_header_are_not_of_it(run: Any) -> None:
    async def talk(server: Server, connect: Connect) -> None:
        client = await connect()
        client.send(HEAD + b"Transfer-Encoding:  chunked  \r\n\r\n" + CHUNKS)
        assert statuses(await client.read_to(b"0\r\n\r\n")) == [200]
        assert server.requests == [("POST /", b"abc")]

    run(talk)


def test_a_body_that_is_longer_than_it_says_is_not_sent(run: Any) -> None:
    """A client would take the rest for the next answer."""

    async def talk(server: Server, connect: Connect) -> None:
        client = await connect()
        client.send(get("/longer") + get())
        assert await client.read() == b""

    run(talk)


def test_a_connection_that_has_ended_is_freed_at_once(run: Any) -> None:
    """Without the collector of cycles, with what its requests had."""

    async def talk(server: Server, connect: Connect) -> None:
        freed = []
        part = HEAD + b"Content-Length: 9\r\n\r\na"
        for data in (b"", get(), get("/wait"), part, get() + b"\0", HEAD + b"X: x\r\n" * 300):
            client = await connect()
            await until(lambda: server.service.state.connections)
            (only,) = server.service.state.connections
            freed.append(weakref.ref(only))
            del only
            client.send(data)
            await asyncio.sleep(SHORT / 5)
            client.leave()
            await until(lambda: not server.service.state.connections)
        await asyncio.sleep(SHORT)  # for what the event loop still has
        assert [one() for one in freed] == [None] * len(freed)

    gc.collect()
    gc.disable()
    try:
        run(talk)
    finally:
        gc.enable()
