"""Bodies: small ones are read on the event loop, long ones by a thread, within limits."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nanovllm.engine.remote.readers import Readers
from nanovllm.server import bodies
from nanovllm.server.bodies import LONG, Bodies
from nanovllm.server.errors import APIError
from nanovllm.server.limits import Limits


class Sent:
    """A request with this body. The client stays until `left` is set."""

    def __init__(self, data: bytes, part: int = 1000) -> None:
        self._data, self._part = data, part
        self.headers: dict[str, str] = {}
        self.left = asyncio.Event()

    async def stream(self) -> Any:
        for start in range(0, len(self._data), self._part):
            yield self._data[start : start + self._part]

    async def receive(self) -> dict[str, str]:
        await self.left.wait()
        return {"type": "http.disconnect"}


@pytest.fixture
def readers() -> Iterator[Readers]:
    readers = Readers()
    yield readers
    readers.close()


def read(
    readers: Readers, data: bytes, parse: Callable[[Any], Any] = lambda body: body, **limits: int
) -> Any:
    async def run() -> Any:
        request: Any = Sent(data)
        return await Bodies(readers, Limits(**limits)).read(request, parse)

    return asyncio.run(run())


def test_a_thread_parses_long_bodies(readers: Readers) -> None:
    def parse(body: Any) -> tuple[Any, bool]:
        return body, threading.current_thread() is threading.main_thread()

    for number, is_long in ((10, False), (LONG, True)):
        body = {"a": [1] * number, "b": "x" * number}
        assert read(readers, json.dumps(body).encode(), parse) == (body, not is_long)


def test_a_long_body_of_a_client_that_left_is_not_parsed(readers: Readers) -> None:
    """It waits, because another one keeps the thread busy."""
    parsed: list[str] = []
    begun, goes_on = threading.Event(), threading.Event()

    def first(_: Any) -> str:
        begun.set()
        goes_on.wait(60)
        return "done"

    async def run() -> None:
        read = Bodies(readers, Limits()).read
        data = json.dumps({"prompt": "x" * (1 << 18)}).encode()
        requests: list[Any] = [Sent(data), Sent(data)]
        busy = asyncio.create_task(read(requests[0], first))
        await asyncio.to_thread(begun.wait, 60)
        waits = asyncio.create_task(read(requests[1], lambda _: parsed.append("second")))
        await asyncio.sleep(0)
        requests[1].left.set()
        with pytest.raises(APIError, match="the client left before its body was parsed"):
            await waits
        goes_on.set()
        assert await busy == "done"

    asyncio.run(run())
    assert not parsed


@pytest.mark.parametrize("padding", [0, LONG])
def test_values_and_nesting_have_limits(readers: Readers, padding: int) -> None:
    end = b', "b": "' + b"x" * padding + b'"}'
    fits = b'{"a": [' + b"1, " * 4 + b"[[]]]" + end
    assert read(readers, fits, max_body_values=70, max_body_depth=4)["a"][0] == 1
    with pytest.raises(APIError) as refused:
        read(readers, fits, max_body_values=69)
    assert refused.value.status == 413
    assert str(refused.value) == "the body must have at most 69 values (max_body_values)"
    with pytest.raises(APIError, match=r"at most 3 lists .*\(max_body_depth\)") as refused:
        read(readers, fits, max_body_depth=3)
    assert refused.value.status == 400


def test_what_is_ordinary_fits(readers: Readers) -> None:
    ids = [*range(262_144)]
    assert read(readers, json.dumps({"prompt": ids}).encode()) == {"prompt": ids}


def test_many_values_are_refused_before_they_are_parsed(
    readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []

    def parse(text: str) -> Any:
        parsed.append(len(text))
        return json.loads(text)

    monkeypatch.setattr(bodies, "parse_json", parse)
    monkeypatch.setattr("nanovllm.server.long_json.parse_json", parse)
    with pytest.raises(APIError, match="max_body_values"):
        read(readers, b'{"a": [' + b"{}," * 300_000 + b"{}]}")
    assert not parsed
