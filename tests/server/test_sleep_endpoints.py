"""The server's endpoints for sleep."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from servers import serving
from starlette.requests import Request
from starlette.types import Message
from waiting import LIMIT

from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.engine.errors import NotReadyError
from nanovllm.server.errors import APIError
from nanovllm.server.sleeping import Sleeping

BODY = {"model": "adder", "prompt": "12+34=", "temperature": 0, "max_tokens": 8}
SLEEPS = "the engine sleeps; POST /wake_up ends it"
PATHS = ("/sleep", "/wake_up", "/reset_prefix_cache", "/reload_weights")


def test_a_server_sleeps_and_wakes_up(tmp_path: Path) -> None:
    options = ("--served-model-name", "adder", "--sleep-endpoints", "--enable-sleep-mode")
    with (
        serving(tmp_path / "log", EMBEDDED_MODEL, *options) as server,
        httpx.Client(base_url=server.url, timeout=LIMIT) as client,
    ):

        def is_sleeping() -> bool:
            return bool(client.get("/is_sleeping").json()["is_sleeping"])

        def answer() -> str:
            found = client.post("/v1/completions", json=BODY)
            assert found.status_code == 200, found.text
            return str(found.json()["choices"][0]["text"])

        assert answer() == "46" and not is_sleeping()
        assert client.post("/sleep").status_code == 200
        assert is_sleeping()
        refused = client.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == SLEEPS
        assert client.post("/wake_up", params={"tags": ["weights"]}).status_code == 200
        assert is_sleeping()
        assert client.post("/wake_up").status_code == 200
        assert answer() == "46" and not is_sleeping()
        assert client.post("/sleep", params={"level": 2}).status_code == 200
        twice = client.post("/sleep")
        assert twice.status_code == 409 and "retry-after" not in twice.headers
        assert twice.json()["error"]["message"] == "this LLM sleeps already"
        assert client.post("/wake_up").status_code == 200
        assert answer() == "46"
        assert client.post("/sleep", params={"level": 2}).status_code == 200
        for tag in ("weights", "kv_cache"):  # the weights are the trainer's to give
            assert client.post("/wake_up", params={"tags": [tag]}).status_code == 200
        refused = client.post("/v1/completions", json=BODY)
        assert refused.status_code == 503 and not is_sleeping()
        assert "has dropped the weights" in refused.json()["error"]["message"]
        assert client.post("/reload_weights").status_code == 200  # of the checkpoint
        assert answer() == "46"
        assert client.post("/reset_prefix_cache").status_code == 200
        for path, params in (
            ("/sleep", {"level": "3"}), ("/sleep", {"running": "x"}), ("/wake_up", {"tags": "x"}),
        ):  # fmt: skip
            assert client.post(path, params=params).status_code == 400
        for path in ("/sleep", "/wake_up", "/reset_prefix_cache", "/reload_weights"):
            refused = client.post(path, json={"level": 2})
            assert refused.status_code == 400 and not is_sleeping()
            assert "this endpoint has no body" in refused.json()["error"]["message"]
        for path, message in (
            ("/sleep?levl=2", "/sleep takes level and running, got 'levl'"),
            ("/wake_up?tag=weights", "/wake_up takes tags, got 'tag'"),
            ("/reset_prefix_cache?x=1", "/reset_prefix_cache takes no parameters, got 'x'"),
        ):
            refused = client.post(path)
            assert refused.status_code == 400 and not is_sleeping()
            assert refused.json()["error"]["message"] == message


def test_without_the_option_there_are_none(tmp_path: Path) -> None:
    with serving(tmp_path / "log", EMBEDDED_MODEL) as server:
        assert {httpx.post(server.url + path, timeout=LIMIT).status_code for path in PATHS} == {404}


async def no_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


def test_sleep_while_requests_run_is_a_conflict() -> None:
    """Not 503, which clients take for a server that is down."""

    async def sleep(*_: Any, **__: Any) -> None:
        raise NotReadyError("sleep while 1 request is running")

    scope = {"type": "http", "method": "POST", "query_string": b"", "headers": []}
    asked = Sleeping(SimpleNamespace(sleep=sleep)).sleep(Request(scope, no_body))  # type: ignore[arg-type]
    with pytest.raises(APIError, match="1 request is running") as caught:
        asyncio.run(asked)
    assert (caught.value.status, caught.value.code) == (409, "busy")
