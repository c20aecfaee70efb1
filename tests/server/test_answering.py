"""How answers are written."""

import asyncio
import json
import math
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm.engine.schedule.failures import NONE_LEFT, NOT_FINITE
from nanovllm.openai.vectors import embedding_entry, parse_embeddings
from nanovllm.outputs import TokenLogprob
from nanovllm.server.answered import json_response
from nanovllm.server.errors import request_error
from nanovllm.server.event_stream import sse
from nanovllm.server.vectors import entries_of


def test_logits_that_are_not_finite_are_no_bad_request() -> None:
    assert request_error(NOT_FINITE).status == 500
    assert request_error(NONE_LEFT).status == 400


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_null(number: float) -> None:
    """In whole answers, which failed with status 400, as in streams."""
    value = {"a": [TokenLogprob(token_id=1, text="é", logprob=number, rank=1)]}
    whole = json_response(value)
    assert whole.headers["content-type"] == "application/json"
    written = {"a": [{"token_id": 1, "text": "é", "logprob": None, "rank": 1}]}
    assert json.loads(bytes(whole.body)) == written
    assert sse(value) == b"data: " + bytes(whole.body) + b"\n\n"


@pytest.mark.parametrize(
    ("kind", "written"), [("float", [1.0, None]), ("base64", "AACAPwAAgH8=")], ids=str
)
def test_other_tasks_run_while_vectors_are_written(kind: str, written: Any) -> None:
    asked = parse_embeddings(dict(input=["a"] * 50, encoding_format=kind))
    vectors: list[Any] = [SimpleNamespace(embedding=[1.0, math.inf])] * 50
    turns = count()

    async def take_turns() -> None:
        while next(turns) < 1000:
            await asyncio.sleep(0)

    async def write() -> bytes:
        others = asyncio.create_task(take_turns())
        entries = await entries_of(embedding_entry, asked, vectors)
        others.cancel()
        return bytes(json_response(entries).body)

    found = json.loads(asyncio.run(write()))
    assert found == [
        {"object": "embedding", "index": index, "embedding": written} for index in range(50)
    ]
    assert next(turns) >= 50
