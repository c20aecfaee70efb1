"""What is refused before it reaches the engine, and the line that each request has in the log."""

import asyncio
import gzip
import json
import logging
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest
from waiting import FOREVER

from nanovllm.engine.remote.readers import Readers
from nanovllm.server import tokens
from nanovllm.server.answering import Answering
from nanovllm.server.app import ServerEndpoints, make_app
from nanovllm.server.guard import Guard
from nanovllm.server.options import ServerOptions

SITE = "https://a.example"
JSON = "application/json; charset=utf-8"
URL = "http://127.0.0.1:8000"
LINE = re.compile(r"(\S+) ([0-9a-f]{32}) (\d+)(?: first [\d.]+ ms,)? [\d.]+ ms(?: (.*))?")


class App:
    """The server's application, without an engine: no request here comes so far."""

    def __init__(self, root_path: str = "", **options: Any) -> None:
        config = SimpleNamespace(model="m", lora_modules=(), max_num_seqs=1, max_model_len=9)
        model = SimpleNamespace(vocab_size=9)
        llm: Any = SimpleNamespace(
            config=config, model_config=model, max_waiting=0, readers=Readers()
        )
        defaults: dict[str, dict[str, Any]] = {"/v1/completions": {}, "/v1/chat/completions": {}}
        self.app, self.guard = make_app(llm, ServerOptions(**options), defaults)
        self._root_path = root_path

    def ask(self, method: str, path: str, **given: Any) -> httpx.Response:
        """The response to a request."""

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, root_path=self._root_path)
            async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
                return await client.request(method, path, **given)

        return asyncio.run(send())


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """What the log has of requests: path, status and reason of each, and tracebacks."""
    caplog.set_level(logging.INFO, "nanovllm.server")

    def read() -> tuple[list[tuple[str, int, str | None]], int]:
        found = [LINE.fullmatch(one.getMessage()) for one in caplog.records]
        requests = [(m[1], int(m[3]), m[4]) for m in found if m]
        return requests, sum(one.exc_info is not None for one in caplog.records)

    return read


@pytest.mark.parametrize(
    ("headers", "is_refused"),
    [
        ({"Origin": SITE}, True),
        ({"Origin": SITE, "Content-Type": "text/plain"}, True),
        ({"Origin": "null", "Content-Type": "text/plain;application/json"}, True),
        ({"Origin": "http://127.0.0.1:9000"}, True),
        ({"Origin": URL, "Content-Type": "text/plain"}, False),
        ({"Origin": "https://b.example"}, False),
        ({"Origin": SITE, "Content-Type": JSON}, False),  # no browser sends it unasked
        ({}, False),
        ({"Content-Type": "application/x-www-form-urlencoded"}, False),  # curl's
    ],
)
def test_pages_of_other_sites_may_not_post(headers: dict[str, str], is_refused: bool) -> None:
    app = App(cors_origin=["https://b.example"])
    for path in ("/v1/completions", "/stop_profile"):
        response = app.ask("POST", path, headers=headers, content="{")
        assert (response.status_code == 403) == is_refused
    if is_refused:
        error = response.json()["error"]
        assert error["code"] == "origin_not_allowed" and "(--cors-origin)" in error["message"]
    assert app.ask("GET", "/v1/models", headers=headers).status_code == 200
    assert App(cors_origin=["*"]).ask("POST", path, headers=headers).status_code != 403


LOCAL = ("localhost", "LocalHost:8000", "localhost.", "127.0.0.1:9", "127.8.8.8", "[::1]:8000")
FOREIGN = (
    "a.example",
    "a.example:8000",
    "localhost.a.example",
    "10.0.0.1",
    "[::2]",
    "x@localhost",
    "",
)


@pytest.mark.parametrize(
    ("options", "is_open"),
    [
        (dict(), False),
        (dict(host="localhost"), False),
        (dict(host="127.1.2.3"), False),
        (dict(host="::1"), False),
        (dict(allowed_host=["*"]), True),
        (dict(host="0.0.0.0"), True),
        (dict(host="0.0.0.0", allowed_host=["b.example"]), False),
        (dict(uds="/tmp/socket"), True),
        (dict(uds="/tmp/socket", allowed_host=["b.example"]), False),
        (dict(api_key=["k"]), True),  # no page has it
        (dict(api_key=["k"], allowed_host=["b.example"]), False),
    ],
)
def test_a_site_that_leads_its_name_to_the_server_is_refused(
    options: dict[str, Any], is_open: bool
) -> None:
    app, key = App(**options), {"Authorization": "Bearer k"}
    for host in LOCAL:
        assert app.ask("GET", "/v1/models", headers={"Host": host, **key}).status_code == 200, host
    for host in FOREIGN:
        for path in ("/v1/models", "/metrics", "/health", "/"):
            headers = {"Host": host, **key}
            if not is_open or path == "/v1/models":
                found = app.ask("GET", path, headers=headers)
                assert found.status_code == (200 if is_open else 403), host
    if not is_open:
        error = found.json()["error"]
        assert error["code"] == "host_not_allowed"
        assert error["message"].endswith(" is not a name of this server (--allowed-host)")
    if "allowed_host" in options:
        for host in ("b.example", "B.Example:80"):
            assert app.ask("GET", "/v1/models", headers={"Host": host, **key}).status_code == 200


def test_a_compressed_body_is_refused() -> None:
    body = gzip.compress(b'{"prompt": "a"}')
    for encoding in ("gzip", "br", "identity, gzip"):
        headers = {"Content-Encoding": encoding}
        found = App().ask("POST", "/v1/completions", headers=headers, content=body)
        assert found.status_code == 415
        message = found.json()["error"]["message"]
        assert message == f"the body must not be compressed, got {encoding!r}"
    plain = {"Content-Encoding": "identity"}
    assert App().ask("POST", "/v1/completions", headers=plain, content="[]").status_code == 400


def test_a_key_is_compared_as_it_is_sent() -> None:
    app = App(api_key=["schlüssel"])
    sent = b"Bearer " + "schlüssel".encode()
    assert app.ask("GET", "/v1/models", headers={b"Authorization": sent}).status_code == 200
    wrong = app.ask("GET", "/v1/models", headers={b"Authorization": sent[:-1]})
    assert wrong.status_code == 401
    basic = app.ask("GET", "/v1/models", headers={b"Authorization": b"Basic" + sent[6:]})
    assert basic.status_code == 401, "another scheme"


@pytest.mark.parametrize("root", ["", "/llm"])
def test_paths_are_those_behind_the_proxys(root: str, lines: Any) -> None:
    app = App(root, api_key=["k"], sleep_endpoints=True)
    key = {"Authorization": "Bearer k"}
    assert app.ask("GET", f"{root}/version").status_code == 200
    assert app.ask("GET", f"{root}/v1/models").status_code == 401
    assert app.ask("GET", f"{root}version").status_code == (401 if root else 200)
    lost = app.ask("GET", f"{root}/nope", headers=key).json()["error"]["message"]
    assert lost == "there is no path '/nope'"
    refused = app.ask("POST", f"{root}/reset_prefix_cache?x=1", headers=key).json()["error"]
    assert refused["message"] == "/reset_prefix_cache takes no parameters, got 'x'"
    paths = [path for path, *_ in lines()[0]]
    more = ["/llmversion"] if root else []
    assert paths == ["/v1/models", *more, "/nope", "/reset_prefix_cache"]


def test_each_refused_request_has_one_line_with_the_reason(lines: Any) -> None:
    app = App(api_key=["k"])
    key = {"Authorization": "Bearer k"}

    def post(path: str, **body: Any) -> None:
        app.ask("POST", path, headers=key, json=body)

    app.ask("POST", "/v1/completions", json={"prompt": "secret"})
    post("/v1/completions", prompt="secret", max_tokens="secret")
    post("/v1/completions", prompt="secret", structured_outputs={"regex": "a", "choice": "secret"})
    post("/v1/completions", prompt="secret", model="secret")
    post("/tokenize", prompt=["secret"])
    post("/v1/completions", prompt="secret", secret=1)
    post("/v1/completions", prompt="secret", response_format={"secret": 1})
    app.ask("POST", "/v1/completions", headers=key, content='"secret"')
    app.ask("POST", "/v1/completions", headers=key, content="{secret")
    app.ask("GET", "/a%0Ab" + 300 * "c", headers=key)
    app.ask("GET", "/tokenize", headers=key)
    for path in ("/version", "/metrics/x"):
        app.ask("GET", path)
    app.guard.is_draining = True
    app.ask("GET", "/health")
    completions = "/v1/completions"
    requests, num_tracebacks = lines()
    assert not any("secret" in reason for *_, reason in requests)
    assert [(*one[:2], one[2]) for one in requests[:9]] == [
        (completions, 401, "invalid_api_key"),
        (completions, 400, "max_tokens must be an integer >= 1"),
        (completions, 400, "structured_outputs: choice must be an array of texts"),
        (completions, 404, "model_not_found"),
        ("/tokenize", 400, "prompt must be a text"),
        (completions, 400, "unknown field"),
        (completions, 400, "response_format must be an object whose type is one of text,"
                           " json_object, json_schema, structural_tag"),
        (completions, 400, "the body must be a JSON object"),
        (completions, 400, "the body is not valid JSON: Expecting property name enclosed in double"
                           " quotes: line 1 column 2 (char 1)"),
    ]  # fmt: skip
    path, status, reason = requests[9]
    assert path.startswith(r"/a\nbccc") and len(path) < 210 and status == 404
    assert reason == "there is no path"
    assert requests[10:] == [
        ("/tokenize", 405, "/tokenize takes POST"),
        ("/metrics/x", 401, "invalid_api_key"),
        ("/health", 503, "draining"),
    ]
    assert num_tracebacks == 0


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (dict(prompt="abcd"), "prompt"),
        (
            dict(messages=[dict(content=[dict(text="ab")], tool="c")], tools=["d"]),
            "messages and tools",
        ),
    ],
)
def test_the_text_to_tokenize_has_a_limit(body: dict[str, Any], name: str) -> None:
    response = App(max_tokenize_chars=3).ask("POST", "/tokenize", json=body)
    message = f"{name} must have at most 3 characters (max_tokenize_chars), got 4"
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", dict(prompt=["b" * 30])),
        ("/v1/completions", dict(prompt="b" * 30, cache_salt="x")),
        ("/v1/chat/completions", dict(messages=[dict(role="user", content="b" * 11)] * 2)),
        ("/v1/chat/completions", dict(messages=[dict(role="user", cache_salt="b" * 26)])),
        ("/v1/embeddings", dict(input=["a", "b" * 30])),
        ("/v1/embeddings", dict(input="b" * 30)),
        ("/rerank", dict(query="a", documents=["a", "b" * 30])),
        ("/score", dict(queries="b" * 30, documents=["a"])),
    ],
)
def test_prompts_to_truncate_have_a_limit(path: str, body: dict[str, Any]) -> None:
    """They are tokenized as a whole, which takes time and memory."""
    app = App(max_tokenize_chars=29)
    response = app.ask("POST", path, json=dict(body, truncate_prompt_tokens=1))
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message == (
        "truncate_prompt_tokens needs a prompt of at most 29 characters"
        " (max_tokenize_chars), got 30"
    )


def test_tokens_become_json_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "SLICE", 3)
    for number in range(8):
        ids = [*range(number)]
        slices: list[list[int]] = []

        def names(part: list[int], slices: list[list[int]] = slices) -> list[str]:
            slices.append(part)
            return [f'"{token_id}' for token_id in part]

        written = [tokens._json_list(ids), tokens._json_list(ids, names)]
        assert json.loads(orjson.dumps(written)) == [ids, [f'"{token_id}' for token_id in ids]]
        assert all(len(part) <= 3 for part in slices)


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("x"), OSError("x"), MemoryError()])
def test_an_internal_error_is_logged_once(
    error: Exception, lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(ServerEndpoints, "version", fail)
    response = App().ask("GET", "/version")
    assert response.status_code == 500 and response.headers["x-should-retry"] == "false"
    message = f"internal server error: {type(error).__name__}: {error}"
    assert response.json()["error"]["message"] == message
    assert lines() == ([("/version", 500, "internal_error")], 1)


def test_a_body_that_breaks_off_is_a_client_that_left(lines: Any) -> None:
    app = App()
    parts = iter(
        [
            {"type": "http.request", "body": b'{"pro', "more_body": True},
            {"type": "http.disconnect"},
        ]
    )

    async def receive() -> Any:
        return next(parts)

    async def send(_: Any) -> None:
        pass

    scope: Any = {
        "type": "http", "method": "POST", "path": "/v1/completions", "headers": [],
        "query_string": b"", "root_path": "",
    }  # fmt: skip
    asyncio.run(app.app(scope, receive, send))
    reason = "the client left before the end of the body"
    assert lines() == ([("/v1/completions", 499, reason)], 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_has_one_line(
    stream: bool, lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine never ends; of a stream, the first event has been sent by then."""

    async def body(*_: Any) -> Any:
        await asyncio.sleep(FOREVER)

    async def chunks(*_: Any) -> AsyncIterator[tuple[bytes, bool]]:
        yield b"data: {}\n\n", False
        await asyncio.sleep(FOREVER)

    monkeypatch.setattr(Answering, "_body", body)
    monkeypatch.setattr(Answering, "_chunks", chunks)
    asked = {"prompt": "a", "stream": stream}
    response = App(timeout=0.05).ask("POST", "/v1/completions", json=asked)
    assert '"code":"timeout"' in response.text
    if stream:
        assert response.status_code == 200 and response.text.startswith("data: {}\n\n")
    else:
        assert response.status_code == 408 and response.headers["x-should-retry"] == "false"
    assert lines() == ([("/v1/completions", 408, "timeout")], 0)


def test_requests_that_are_cancelled_count_no_longer(lines: Any) -> None:
    async def cancel() -> Guard:
        guard = Guard((), ())

        async def forever(*_: Any) -> None:
            await asyncio.sleep(60)

        async def nothing(*_: Any) -> Any:
            pass

        scope: Any = {"type": "http", "method": "GET", "path": "/x", "headers": []}
        task = asyncio.ensure_future(guard.around(forever)(scope, nothing, nothing))
        await asyncio.sleep(0)
        assert guard.num_active == 1
        task.cancel()
        await asyncio.wait({task})
        return guard

    assert asyncio.run(cancel()).num_active == 0
    assert lines() == ([("/x", 499, None)], 0)
