"""Long answers are made in slices: other tasks of the event loop run in between."""

import asyncio
import itertools
import json
import random
import threading
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import orjson
import pytest
from conftest import byte_tokenizer

from nanovllm import SamplingParams
from nanovllm.chat.answers import PLAIN
from nanovllm.engine.remote.messages import PromptProgress, RequestEnd, SampleProgress
from nanovllm.engine.remote.open_request import OpenRequest
from nanovllm.engine.remote.readers import SMALL, Readers
from nanovllm.engine.remote.request_copy import RequestCopy
from nanovllm.engine.requests import logprobs
from nanovllm.engine.requests.logprobs import LikelyToken, Logprobs
from nanovllm.engine.requests.measures import RequestTimes
from nanovllm.engine.requests.output_text import OutputText
from nanovllm.engine.requests.request import Request
from nanovllm.engine.schedule.parts import SequenceParts
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.openai import logprobs as openai_logprobs
from nanovllm.openai.chunks import ChunkWriter
from nanovllm.openai.request import APIRequest, parse_body
from nanovllm.openai.response import response_body
from nanovllm.server import answer_json as written
from nanovllm.server import answering
from nanovllm.server.answer_json import answer_json
from nanovllm.server.answering import Answering
from nanovllm.server.event_stream import sse
from nanovllm.server.options import ServerOptions
from nanovllm.utils.slices import SLICE, finish, next_turn

T = TypeVar("T")
TOP = 20
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Tokenizer:
    """A tokenizer that counts the calls for single tokens."""

    def __init__(self) -> None:
        self._tokenizer = byte_tokenizer()
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: list[int], **options: Any) -> Any:
        self.num_calls += len(ids) == 1
        return self._tokenizer.decode(ids, **options)

    def convert_ids_to_tokens(self, token_id: int) -> Any:
        self.num_calls += 1
        return self._tokenizer.convert_ids_to_tokens(token_id)


def asked(url: str, n: int, **fields: Any) -> APIRequest:
    body: dict[str, Any] = dict(prompt="x", logprobs=TOP, n=n, **fields)
    if url == CHAT:
        messages = [dict(role="user", content="x")]
        body = dict(messages=messages, logprobs=True, top_logprobs=TOP, n=n, **fields)
    return parse_body(url, body, {})


def likely(rng: random.Random) -> list[LikelyToken]:
    return [(rng.randrange(256), -1.0 - rank / 8, rank) for rank in range(1, TOP + 2)]


def finished(
    params: SamplingParams,
    tokenizer: Any,
    num: int,
    streams: bool,
    num_generated: int | None = None,
) -> OpenRequest:
    """A request that has ended, with `num` tokens in its prompt and in each of its samples.

    With `num_generated`, samples have this many.
    """
    rng = random.Random(0)
    seqs = []
    for index in range(params.n):
        parts = SequenceParts()
        parts.logprobs = Logprobs(num)
        if streams:
            parts.text = OutputText(tokenizer, params)
        seqs.append(Sequence([1] * num, params, index=index, parts=parts))
    seqs[0].siblings = seqs[1:]
    request = OpenRequest(0, "a", RequestCopy(Request(seqs), tokenizer), not streams, params.n)
    for index in range(params.n):
        entries = [likely(rng) for _ in range(num_generated or num)]
        ids = [entry[0][0] for entry in entries]
        request.copy.apply(SampleProgress(0, index, ids, entries, "length", None))
    if params.prompt_logprobs:
        request.copy.add_prompt(PromptProgress(0, [likely(rng) for _ in range(num - 1)]))
    request.copy.end(RequestEnd(0, RequestTimes(), 0))
    request.end()
    return request


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The log-probabilities, in any form, that were made since the loop's last turn."""
    done = [0]

    def count(module: Any, name: str, size: Any) -> None:
        plain = getattr(module, name)

        def counted(*args: Any) -> Any:
            done[0] += size(args[0])
            return plain(*args)

        monkeypatch.setattr(module, name, counted)

    count(logprobs, "_with_texts", len)
    count(openai_logprobs, "_chat_token", lambda _: 1)
    count(openai_logprobs, "_by_text", len)
    return done


def most_work(work: list[int], task: Awaitable[T]) -> tuple[T, int]:
    """The result of a task, and the most work that it has done in one turn of the loop."""

    async def run() -> tuple[T, int]:
        most, other = 0, asyncio.ensure_future(task)
        while not other.done():
            work[0] = 0
            await asyncio.sleep(0)
            most = max(most, work[0])
        return await other, most

    return asyncio.run(run())


class LLM:
    """An engine with one request, which has ended; it gives a chat no prompt."""

    def __init__(self, request: OpenRequest, tokenizer: Any) -> None:
        self._request, self.tokenizer, self.readers = request, tokenizer, Readers()

    async def chat_turn(self, _: Any, params: SamplingParams) -> Any:
        return SimpleNamespace(params=params, answer=PLAIN, prompt=None)

    @asynccontextmanager
    async def request(self, *_: Any, **__: Any) -> AsyncIterator[OpenRequest]:
        yield self._request


async def answer(request: OpenRequest, form: APIRequest, tokenizer: Any) -> Any:
    """The server's whole answer as JSON."""
    models = SimpleNamespace(names=["m"], adapter=lambda _: None)
    line = SimpleNamespace(name="a", record_first_token=id, count=lambda *_: None)
    llm: Any = LLM(request, tokenizer)
    server = Answering(llm, models, ServerOptions(), {})  # type: ignore[arg-type]
    return json.loads(await server._body(line, form))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        (CHAT, {}), (CHAT, dict(prompt_logprobs=TOP)), (TEXT, {}),
        (TEXT, dict(prompt_logprobs=TOP)), (TEXT, dict(echo=True)),
    ],
)  # fmt: skip
def test_a_whole_answer_is_made_in_slices(
    url: str, fields: Any, work: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the same as one that is made at once, and each token's entry is JSON until then."""
    tokenizer, form = byte_tokenizer(), asked(url, 4, **fields)
    request = finished(form.params, tokenizer, 100, streams=False)
    kinds = set[type]()

    def recorded(body: Any) -> Any:
        likely = [choice["logprobs"] for choice in body["choices"]]
        of_tokens = [one["content" if url == CHAT else "top_logprobs"] for one in likely]
        of_tokens.append(body.get("prompt_logprobs") or ())
        kinds.update(map(type, itertools.chain(*of_tokens)))
        return answer_json(body)

    monkeypatch.setattr(answering, "answer_json", recorded)
    found, most = most_work(work, answer(request, form, tokenizer))
    assert kinds - {type(None)} == {orjson.Fragment}
    assert 100 < most < 4 * SLICE
    output, most = most_work(work, finished(form.params, tokenizer, 100, False).output())
    assert type(output["logprobs"]) is list and 100 < most < 2 * SLICE
    body = finish(response_body("a", form, [output], "m", tokenizer))
    assert found == {**json.loads(json.dumps(body)), "created": found["created"]}


def test_a_thread_decodes_an_echoed_prompt_once_for_all_samples() -> None:
    class Decoder(Tokenizer):
        threads: ClassVar[list[threading.Thread]] = []

        def decode(self, ids: list[int], **options: Any) -> Any:
            if len(ids) == SMALL and not options:  # the prompt; samples are shorter
                self.threads.append(threading.current_thread())
            return super().decode(ids, **options)

    body = dict(prompt=[1] * (SMALL + 9), echo=True, n=3, truncate_prompt_tokens=SMALL)
    tokenizer, form = Decoder(), parse_body(TEXT, body, {})
    request = finished(form.params, tokenizer, SMALL, streams=False, num_generated=4)
    choices = asyncio.run(answer(request, form, tokenizer))["choices"]
    prompt = tokenizer.decode([1] * SMALL, skip_special_tokens=False)
    assert [choice["text"].startswith(prompt) for choice in choices] == [True] * 3
    assert len(Decoder.threads) == 1 and Decoder.threads[0] is not threading.main_thread()


def test_the_json_of_an_answer_is_written_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"token": "a", "top_logprobs": [{"token": "é", "logprob": float("-inf")}] * 3}
    choice = {
        "index": 0, "message": {"content": "a" * 100}, "logprobs": {"content": [entry] * 50},
        "tokens": ["a", None] * 5000, "token_ids": [*range(9000)], "none": None, "empty": [],
    }  # fmt: skip
    body: dict[str, Any] = {
        "id": 1,
        "choices": [choice] * 3,
        "prompt_logprobs": [None, *[[entry]] * 40],
    }
    body["usage"] = {"total_tokens": 27_000}
    sizes, plain = [], written.orjson.dumps

    def counted(value: Any) -> bytes:
        sizes.append(len(value))
        return plain(value)

    whole = plain(body)
    monkeypatch.setattr(written.orjson, "dumps", counted)
    assert finish(answer_json(body)) == whole
    assert max(sizes) == written.NUMBERS_AT_ONCE and len(sizes) > 3 * (50 // written.AT_ONCE)


@pytest.mark.parametrize("url", [CHAT, TEXT])
def test_a_stream_that_is_read_late_comes_in_slices(url: str, work: list[int]) -> None:
    """Both with many samples and with many tokens of one sample."""
    for n, num in ((40, 30), (1, 400)):
        tokenizer, form = byte_tokenizer(), asked(url, n, stream=True)
        request = finished(form.params, tokenizer, num, streams=True)
        writers = [ChunkWriter("a", form, index, "m", tokenizer, 1) for index in range(n)]
        events = []

        async def read() -> None:
            async for event in request.events():  # noqa: B023
                events.append(event)  # noqa: B023
                assert sse(writers[event["sample"]].chunk(event))  # noqa: B023

        _, most = most_work(work, read())
        assert 100 < most < 6 * SLICE
        output = asyncio.run(finished(form.params, tokenizer, num, streams=True).output())
        for sample in output["outputs"]:
            own = [event for event in events if event["sample"] == sample["index"]]
            assert "".join(event["text"] for event in own) == sample["text"]
            for name in ("token_ids", "logprobs"):
                assert [*itertools.chain(*(event[name] for event in own))] == sample[name]
            assert [event["finish_reason"] for event in own] == [None] * (len(own) - 1) + ["length"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_token_is_decoded_once(streams: bool) -> None:
    """However often it is among the likely ones, also of later requests."""
    tokenizer, form = Tokenizer(), asked(CHAT, 4)
    for _ in range(2):
        request = finished(form.params, tokenizer, 100, streams=False)
        if streams:
            writer = ChunkWriter("a", form, 0, "m", tokenizer, 1)

            async def read() -> None:
                async for event in request.events():  # noqa: B023
                    writer.chunk(event)  # noqa: B023

            asyncio.run(read())
        else:
            asyncio.run(answer(request, form, tokenizer))
    assert tokenizer.num_calls < 2 * 256 + 100


def test_long_tasks_take_turns() -> None:
    """One slice of all long tasks is done in a turn of the loop, whatever their number."""
    slices, turns = 0, 0

    async def work_long() -> None:
        nonlocal slices
        for _ in range(5):
            await next_turn()
            slices += 1

    async def run() -> None:
        nonlocal turns
        tasks = [asyncio.ensure_future(work_long()) for _ in range(20)]
        while not all(task.done() for task in tasks):
            before = slices
            await asyncio.sleep(0)
            turns += 1
            assert slices <= before + 1

    asyncio.run(run())
    assert slices == 100 <= turns < 400
