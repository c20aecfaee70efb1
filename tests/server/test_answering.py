"""How answers are written."""

import asyncio
import json
import math
import threading
from itertools import count
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from nanovllm.engine.remote.readers import Readers
from nanovllm.engine.schedule.failures import NONE_LEFT, NOT_FINITE
from nanovllm.openai.request import COMPLETIONS, parse_body
from nanovllm.openai.response import echoed_text
from nanovllm.openai.vectors import parse_embeddings
from nanovllm.outputs import TokenLogprob
from nanovllm.server.answering import Answering, _sse, json_response
from nanovllm.server.errors import request_error
from nanovllm.server.options import ServerOptions
from nanovllm.server.vectors import _embedding_entries


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
    assert _sse(value) == b"data: " + bytes(whole.body) + b"\n\n"


def test_a_thread_decodes_long_prompts_once_for_all_samples() -> None:
    class Decoder:
        threads: ClassVar[list[threading.Thread]] = []

        def decode(self, ids: list[int]) -> str:
            self.threads.append(threading.current_thread())
            return "a" * len(ids)

    llm: Any = SimpleNamespace(readers=Readers(), tokenizer=Decoder())
    answering = Answering(llm, None, ServerOptions(), {})  # type: ignore[arg-type]
    body = dict(prompt=[1] * 5000, echo=True, n=4, truncate_prompt_tokens=4000)
    asked = parse_body(COMPLETIONS, body, {})
    outputs: list[Any] = [dict(prompt=None, prompt_token_ids=[1] * 4000)]
    whole = asyncio.run(answering._with_echoes(asked, outputs))
    for _ in range(4):
        assert echoed_text(outputs[0]["prompt"], [], whole.params, llm.tokenizer) == "a" * 4000
    assert len(Decoder.threads) == 1 and Decoder.threads[0] is not threading.main_thread()


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
        entries = await _embedding_entries(asked, vectors)
        others.cancel()
        return bytes(json_response(entries).body)

    found = json.loads(asyncio.run(write()))
    assert found == [
        {"object": "embedding", "index": index, "embedding": written} for index in range(50)
    ]
    assert next(turns) >= 50
