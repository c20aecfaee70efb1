"""What one request, and one client, may ask for; and that a client's counts end with its requests.

The engine here is a stand-in that fails, waits or answers as a test says.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import LIMIT

from nanovllm.engine.errors import EngineFullError
from nanovllm.engine.remote.readers import Readers
from nanovllm.server.app import make_app
from nanovllm.server.clients import address_of
from nanovllm.server.options import ServerOptions

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
Answer = tuple[int, dict[str, str], bytes]


class Engine:
    """Does `work` for each request."""

    max_waiting = 10_000
    tokenizer = None
    config = SimpleNamespace(model="m", lora_modules=(), max_num_seqs=1, max_model_len=1 << 20)

    model_config = SimpleNamespace(vocab_size=9)

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self.readers = Readers()
        self._work = work

    async def embed(self, prompts: list[Any], **_: Any) -> list[Any]:
        await self._work()
        return [SimpleNamespace(embedding=[1.0], num_prompt_tokens=1) for _ in prompts]

    score = embed

    async def ping(self, _: float) -> None:
        pass

    @asynccontextmanager
    async def request(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        async def events() -> AsyncIterator[Any]:
            event: Any = dict(
                sample=0, text="a", token_ids=[1], finish_reason=None, logprobs=None,
                stop_reason=None,
            )  # fmt: skip
            yield event
            await self._work()
            event["finish_reason"] = "length"
            yield event

        async def output(**_: Any) -> None:
            await self._work()

        yield SimpleNamespace(
            output=output,
            events=events,
            first_token_id=1,
            is_over=True,
            num_prompt_tokens=1,
            num_cached_tokens=0,
        )  # fmt: skip


class Server:
    """The server's application before an engine that waits until `go` is set, and then may fail."""

    def __init__(self, error: Exception | None = None, **options: Any) -> None:
        self.go = asyncio.Event()

        async def wait() -> None:
            await self.go.wait()
            if error is not None:
                raise error

        defaults: dict[str, dict[str, Any]] = {COMPLETIONS: {}, CHAT: {"max_tokens": None}}
        engine: Any = Engine(wait)
        options = {"timeout": 10.0} | options  # a request that should be refused ends
        self.app, self.guard = make_app(engine, ServerOptions(**options), defaults)

    @property
    def counts(self) -> dict[Any, tuple[int, int]]:
        """The requests and samples of each client that has some."""
        counts = self.guard.clients.counts
        return {client: (each.requests, each.samples) for client, each in counts.items()}

    async def ask(
        self,
        path: str = COMPLETIONS,
        address: str = "1.2.3.4",
        headers: dict[str, str] | None = None,
        leave: asyncio.Event | None = None,
        method: str = "POST",
        **body: Any,
    ) -> Answer:
        """Send a request, whose client disconnects when `leave` is set."""
        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(),
            "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
            "client": (address, 5), "server": ("127.0.0.1", 8000),
            "headers": [(n.lower().encode(), v.encode()) for n, v in (headers or {}).items()],
        }  # fmt: skip
        parts = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            if parts:
                return parts.pop()
            await (leave or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        head = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], head, b"".join(one.get("body", b"") for one in sent)


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, LIMIT))


def message_of(answer: Answer) -> str:
    return str(json.loads(answer[2])["error"]["message"])


async def settle() -> None:
    """Let all tasks go on until they wait for something."""
    for _ in range(20):
        await asyncio.sleep(0)


BODY: dict[str, Any] = dict(prompt=["a", "b"], n=3)
ONE: dict[str, Any] = dict(prompt="a", n=3, stream=True)
ENDS: dict[str, tuple[Exception | None, dict[str, Any], int]] = {
    "an answer": (None, dict(path=EMBEDDINGS, input=["a"] * 6), 200),
    "a stream": (None, ONE, 200),
    "an internal error": (OSError("disk"), BODY, 500),
    "a full engine": (EngineFullError("full"), BODY, 429),
    "a bad request that the engine finds": (ValueError("bad"), BODY, 400),
    "an error in a stream": (OSError("disk"), ONE, 200),
}


@pytest.mark.parametrize("ending", ENDS)
def test_counts_end_with(ending: str) -> None:
    error, body, status = ENDS[ending]

    async def check() -> None:
        server = Server(error, max_client_requests=1, max_client_samples=6)
        task = asyncio.ensure_future(server.ask(**body))
        await settle()
        samples = len(body.get("input", [])) or len(body["prompt"]) * body["n"]
        assert server.counts == {"1.2.3.4": (1, samples)}
        server.go.set()
        answer = await task
        assert answer[0] == status
        assert (b"disk" in answer[2]) == isinstance(error, OSError)
        assert server.counts == {}

    run(check())


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("how", ["the client leaves", "the task is cancelled", "a timeout"])
def test_counts_end_when(how: str, streams: bool) -> None:
    async def check() -> None:
        timeout = 0.01 if how == "a timeout" else None
        server, leave = Server(max_client_samples=6, timeout=timeout), asyncio.Event()
        task = asyncio.ensure_future(server.ask(**BODY, stream=streams, leave=leave))
        await settle()
        assert server.counts == {"1.2.3.4": (1, 6)}
        if how == "the client leaves":
            leave.set()
        elif how == "the task is cancelled":
            task.cancel()
        await asyncio.wait([task])
        assert server.counts == {}

    run(check())


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETIONS, dict(prompt="a", n=13), 400), (COMPLETIONS, dict(prompt="a", n=7), 429),
        (COMPLETIONS, dict(prompt="a", n=0), 400), (COMPLETIONS, dict(x=1), 400),
        (EMBEDDINGS, dict(input=["a"], model="x"), 404),
        (CHAT, dict(messages=[], n=6, max_tokens=1), 500), ("/x", {}, 404), ("/health", {}, 405),
    ],
)  # fmt: skip
def test_a_refused_request_leaves_the_counts_of_others(
    path: str, body: dict[str, Any], status: int
) -> None:
    async def check() -> None:
        server = Server(max_client_samples=12)
        task = asyncio.ensure_future(server.ask(**BODY))
        await settle()
        assert (await server.ask(path, **body))[0] == status
        assert server.counts == {"1.2.3.4": (1, 6)}
        task.cancel()
        await asyncio.wait([task])
        assert server.counts == {}

    run(check())


def test_a_client_has_at_most_so_many_requests() -> None:
    """Others go on, and paths that do no work are answered."""

    async def check() -> None:
        server = Server(max_client_requests=2)
        tasks = [asyncio.ensure_future(server.ask(**BODY)) for _ in range(2)]
        await settle()
        status, headers, _ = answer = await server.ask(**BODY)
        assert (status, headers["retry-after"]) == (429, "1")
        assert "2 requests, and at most 2" in message_of(answer)
        assert "(max_client_requests)" in message_of(answer)
        for path in ("/health", "/version", "/v1/models"):
            assert (await server.ask(path, method="GET"))[0] == 200
        tasks.append(asyncio.ensure_future(server.ask(**BODY, address="1.2.3.5")))
        await settle()
        assert server.counts == {"1.2.3.4": (2, 12), "1.2.3.5": (1, 6)}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert server.counts == {}

    run(check())


def test_a_client_has_at_most_so_many_samples() -> None:
    """Inputs of vectors count, too. A request that could never run is a bad one."""

    async def check() -> None:
        server = Server(max_client_samples=10)
        task = asyncio.ensure_future(server.ask(**BODY))
        await settle()
        for body in (BODY, dict(path=EMBEDDINGS, input=["a"] * 5), dict(prompt="a", n=5)):
            status, headers, _ = answer = await server.ask(**body)
            assert (status, headers["retry-after"]) == (429, "1")
            assert "6 samples, and at most 10" in message_of(answer)
        for body in (
            dict(path=EMBEDDINGS, input=["a"] * 11), dict(prompt="a", n=11),
            dict(path="/score", queries="a", documents=["a"] * 11),
        ):  # fmt: skip
            answer = await server.ask(**body)
            assert answer[0] == 400
            assert "at most 10 (max_client_samples), got 11" in message_of(answer)
        server.go.set()
        assert (await server.ask(path=EMBEDDINGS, input=["a"] * 4))[0] == 200
        await task
        assert server.counts == {}

    run(check())


def test_a_client_is_a_key_where_keys_are_needed() -> None:
    """However it is spelled in the header, and from whatever address it comes."""

    async def check() -> None:
        server = Server(api_key=["one", "two"], max_client_requests=1)
        first = dict(Authorization="Bearer one")
        task = asyncio.ensure_future(server.ask(**BODY, headers=first))
        await settle()
        for spelled in ("Bearer one", "bearer  one "):
            headers = dict(Authorization=spelled)
            assert (await server.ask(**BODY, headers=headers, address="9.9.9.9"))[0] == 429
        assert (await server.ask(**BODY))[0] == 401
        server.go.set()
        second = dict(Authorization="Bearer two")
        assert (await server.ask(EMBEDDINGS, input="a", headers=second))[0] == 200
        await task
        assert server.counts == {}

    run(check())


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("1.2.3.4", "1.2.3.4"), ("::ffff:1.2.3.4", "1.2.3.4"),
        ("2001:db8:0:1::5", "20010db800000001::/64"), ("a", "a"), ("", ""),
        ("2001:db8:0:1:f::9", "20010db800000001::/64"),
        ("2001:db8:0:2::5", "20010db800000002::/64"),
    ],
)  # fmt: skip
def test_addresses_of_one_network_are_one_client(address: str, client: str) -> None:
    assert address_of({"client": (address, 80)}) == client
    assert address_of({"client": None}) == ""


@pytest.mark.parametrize(
    ("body", "got"),
    [
        (dict(prompt="a", n=11, max_tokens=10), "1 times 11 times 10"),
        (dict(prompt=["a"] * 6, n=2, max_tokens=10), "6 times 2 times 10"),
        (dict(prompt=["a"] * 10), "10 times 1 times 16"),
        (dict(prompt="a", n=2, max_tokens=1 << 30), f"1 times 2 times {1 << 20}"),
    ],
)
def test_a_request_has_at_most_so_many_tokens(body: dict[str, Any], got: str) -> None:
    async def check() -> None:
        server = Server(max_request_tokens=109)
        answer = await server.ask(**{"max_tokens": 16, **body})
        assert answer[0] == 400
        assert f"at most 109 (max_request_tokens), got {got}" in message_of(answer)

    run(check())


def test_a_sample_may_have_all_tokens_that_the_model_takes() -> None:
    """Without `max_tokens`, too. By default, sixteen samples of a million tokens are allowed."""

    async def check() -> None:
        server = Server(max_request_tokens=1)
        server.go.set()
        assert (await server.ask(prompt="a", max_tokens=1 << 30, stream=True))[0] == 200
        server = Server()
        server.go.set()
        assert (await server.ask(prompt="a", n=16, max_tokens=1 << 20, stream=True))[0] == 200
        chat: Any = dict(path=CHAT, messages=[], n=17)
        assert "(max_request_tokens), got 1 times 17" in message_of(await server.ask(**chat))

    run(check())


def test_requests_have_no_priority_unless_the_server_allows_it() -> None:
    """One that repeats the server's own, or none, is no choice."""

    async def check() -> None:
        for path, body in ((COMPLETIONS, dict(prompt="a")), (CHAT, dict(messages=[]))):
            for priority in (-1, 5):
                answer = await Server().ask(path, **body, priority=priority)
                assert answer[0] == 400 and "(--allow-priority)" in message_of(answer)
        for options, priority in ((dict(allow_priority=True), -1), ({}, 0), ({}, None)):
            server = Server(**options)
            server.go.set()
            assert (await server.ask(prompt="a", priority=priority, stream=True))[0] == 200

    run(check())
