"""The server as its clients see it: OpenAI's own, curl, and raw sockets.

It costs more than 20 seconds: many tests start a server.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from conftest import make_model
from reference import make_llm
from servers import OPTIONS, Server, serving
from waiting import FOREVER, LIMIT, wait_until

from nanovllm import LLM, SamplingParams
from nanovllm.embedded import EMBEDDED_MODEL

HI = [{"role": "user", "content": "Hi"}]
LONG: dict[str, Any] = dict(prompt=[1, 2], max_tokens=3000, ignore_eos=True, temperature=0)
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
CHAT = "/v1/chat/completions"
TOOLS: Any = [{"type": "function", "function": {"name": "f"}}]
ORIGIN = {"Origin": "https://a.example"}  # of a page on another site
PATIENT = ("--drain-seconds", str(FOREVER))


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of the random model, with a chat template."""
    path = tmp_path_factory.mktemp("served")
    for file in model_dir.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        "{{ tools or '' }}<tool_call>{% if enable_thinking %}<think>{% endif %}"
    )
    arguments = ("--max-num-seqs", "8", "--served-model-name", "tiny", "--served-model-name", "t")
    with serving(path / "log", str(path), *arguments, "--max-body-mib", "1") as server:
        yield server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can write for many seconds."""
    return make_model(tmp_path_factory.mktemp("long"), max_position_embeddings=16384)


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> LLM:
    return make_llm(model_dir)


def post(server: Server, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=LIMIT)


def metric(server: Server, name: str) -> float:
    """The sum of all metrics whose names begin so."""
    text = httpx.get(f"{server.url}/metrics", timeout=LIMIT).text
    return sum(float(n) for n in re.findall(rf"^vllm:{name}\S* (.+)$", text, re.M))


def is_at_rest(server: Server) -> bool:
    """Whether nothing runs there, as its metrics say."""
    return not metric(server, "num_requests_")


def wait_for_rest(server: Server) -> None:
    wait_until("requests go on", lambda: is_at_rest(server))


def wait_for_work(server: Server) -> None:
    wait_until("no request begins", lambda: not is_at_rest(server))


@contextlib.contextmanager
def sent(server: Server, body: dict[str, Any], path: str = "/v1/completions") -> Any:
    """The socket of a client that has sent a request, and leaves at the block's end."""
    with socket.create_connection(address_of(server), timeout=LIMIT) as raw:
        data = json.dumps(body).encode()
        raw.sendall(b"POST %b HTTP/1.1\r\nHost: localhost\r\n" % path.encode())
        raw.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
        yield raw


@contextlib.contextmanager
def begun(server: Server, body: bytes) -> Any:
    """The socket of a client whose request the server has begun to read; its body is to come."""
    with socket.create_connection(address_of(server), timeout=LIMIT) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n")
        raw.sendall(b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
        asked = b""
        while not asked.endswith(b"\r\n\r\n"):  # the application reads the body
            asked += raw.recv(1)
        assert asked.startswith(b"HTTP/1.1 100 ")
        yield raw


def address_of(server: Server) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def wait_until_draining(server: Server, client: httpx.Client, **options: Any) -> httpx.Response:
    """The first response that refuses a request because the server drains."""

    def refused() -> httpx.Response | None:
        response = client.get(f"{server.url}/health", **options)
        return response if response.status_code == 503 else None

    found = wait_until("the server does not drain", refused)
    assert found is not None
    return found


def test_openais_client_gets_completions(server: Server, client: openai.OpenAI, llm: LLM) -> None:
    extra: Any = dict(top_k=20, min_p=0.01, repetition_penalty=1.1, ignore_eos=True)
    params = dict(
        max_tokens=12, temperature=1.1, seed=5, n=2, presence_penalty=0.5,
        logit_bias={"70": 3}, stop=["zz"],
    )  # fmt: skip
    found = client.completions.create(
        model="tiny",
        prompt="abc",
        extra_body=extra,
        logprobs=2,
        user="me",
        **params,  # type: ignore[arg-type]
    )
    asked = {**params, **extra, "logit_bias": {70: 3}, "logprobs": 2}
    (expected,) = llm.generate("abc", SamplingParams(**asked), use_tqdm=False)
    for choice, sample in zip(found.choices, expected.outputs, strict=True):
        assert (choice.text, choice.finish_reason) == (sample.text, sample.finish_reason)
        assert choice.model_extra is not None and choice.logprobs is not None
        assert choice.model_extra["token_ids"] == sample.token_ids
        assert choice.logprobs.token_logprobs == [t[0].logprob for t in sample["logprobs"]]
    assert found.model == "tiny" and found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (3, 24)


def test_openais_client_streams(server: Server, client: openai.OpenAI) -> None:
    asked: Any = dict(model="t", messages=HI, seed=3, max_tokens=20, logprobs=True, top_logprobs=1)
    whole = client.chat.completions.create(**asked, n=2)
    chunks = list(
        client.chat.completions.create(
            **asked, n=2, stream=True, stream_options={"include_usage": True}
        )
    )
    for index, choice in enumerate(whole.choices):
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert "".join(c.delta.content or "" for c in own) == choice.message.content
        assert own[0].delta.role == "assistant" and own[-1].finish_reason == choice.finish_reason
        assert {c.finish_reason for c in own[:-1]} <= {None}
        tokens = [t for c in own if c.logprobs for t in c.logprobs.content or ()]
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [t.token for t in tokens] == [t.token for t in choice.logprobs.content]
        likely = [t.logprob for t in choice.logprobs.content]
        assert [t.logprob for t in tokens] == pytest.approx(likely, abs=1e-4), "a cached prompt"
    assert chunks[-1].choices == [] and chunks[-1].usage and whole.usage
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 40
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_offsets_of_a_stream_are_those_of_the_whole(client: openai.OpenAI) -> None:
    """Where each token's text begins; a chunk begins where the one before has ended."""
    asked: Any = dict(model="t", prompt="abc", max_tokens=6, seed=3, logprobs=0)
    whole = client.completions.create(**asked).choices[0].logprobs
    chunks = [
        chunk.choices[0].logprobs for chunk in client.completions.create(**asked, stream=True)
    ]
    assert whole is not None and whole.text_offset is not None and whole.text_offset[-1] >= 5
    offsets = [offset for part in chunks if part for offset in part.text_offset or ()]
    assert offsets == whole.text_offset


def test_a_stream_ends_with_done(server: Server) -> None:
    for options in ({}, {"stream_options": {"include_usage": True}}):
        text = post(server, prompt="a", max_tokens=2, stream=True, **options).text
        assert text.endswith("\n\ndata: [DONE]\n\n")


def test_usage_has_the_cached_tokens(client: openai.OpenAI) -> None:
    """Of whole answers, and of streams: 9 blocks of 32 tokens."""
    asked: Any = dict(model="t", prompt="Hi" * 150, max_tokens=1)
    options: Any = dict(stream=True, stream_options={"include_usage": True})
    client.completions.create(**asked)
    *_, last = client.completions.create(**asked, **options)
    for usage in (client.completions.create(**asked).usage, last.usage):
        assert usage is not None and usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 288


def test_a_salt_separates_what_is_cached(client: openai.OpenAI) -> None:
    """Whole answers and streams of chats, completions and vectors, through the engine's process."""
    asked: Any = dict(model="t", max_tokens=1)
    chat: Any = dict(asked, messages=[{"role": "user", "content": "Salted" * 40}])
    hits = []
    for salt in (None, "a", "a", "b", None):
        extra: Any = dict(extra_body={"cache_salt": salt})
        options: Any = dict(stream=True, stream_options={"include_usage": True})
        whole = client.completions.create(prompt="Salt" * 75, **asked, **extra)
        answer = client.chat.completions.create(**chat, **extra)
        *_, last = client.chat.completions.create(**chat, **extra, **options)
        usages = [one.usage.prompt_tokens_details.cached_tokens for one in (whole, answer, last)]
        hits.append([number > 0 for number in usages])
    new, known = [False, False, True], [True, True, True]
    assert hits == [new, new, known, new, known]
    for extra in ({"cache_salt": ""}, {"cache_salt": 1}):
        with pytest.raises(openai.BadRequestError, match="cache_salt must"):
            client.completions.create(prompt=["a", "b"], **asked, extra_body=extra)
        with pytest.raises(openai.BadRequestError, match="cache_salt must"):
            client.embeddings.create(model="t", input="a", extra_body=extra)


def test_the_async_client(server: Server) -> None:
    async def both() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            asked: Any = dict(model="tiny", prompt="abc", seed=3, max_tokens=20)
            stream = await client.completions.create(**asked, stream=True)
            text = "".join([chunk.choices[0].text async for chunk in stream])
            return text, (await client.completions.create(**asked)).choices[0].text

    streamed, whole = asyncio.run(both())
    assert streamed == whole


def test_tools_and_formats(server: Server, client: openai.OpenAI) -> None:
    asked: Any = dict(model="tiny", messages=HI, tools=TOOLS, max_tokens=200, seed=1)
    choice: Any = dict(tool_choice="required", parallel_tool_calls=False)
    found = client.chat.completions.create(**asked, **choice).choices[0]
    assert found.finish_reason == "tool_calls" and found.message.content is None
    assert found.message.tool_calls is not None
    (call,) = found.message.tool_calls
    assert call.type == "function" and call.function.name == "f"
    deltas = [
        part
        for chunk in client.chat.completions.create(**asked, **choice, stream=True)
        for part in chunk.choices[0].delta.tool_calls or ()
    ]
    assert deltas[0].function is not None and deltas[0].function.name == "f"
    assert "".join(d.function.arguments or "" for d in deltas if d.function) == "{}"
    cut: Any = {**asked, **choice, "max_tokens": len(CALL) - len("}}\n</tool_call>")}
    *_, last = client.chat.completions.create(**cut, stream=True)
    assert last.choices[0].finish_reason == "length", "its call is not complete"
    schema = {"name": "x", "strict": True, "schema": {"enum": ["a", 22]}}
    formatted = client.chat.completions.create(
        model="tiny",
        messages=HI,
        response_format={"type": "json_schema", "json_schema": schema},  # type: ignore[call-overload]
    )
    assert formatted.choices[0].message.content in ('"a"', "22")


def test_prompts_of_all_kinds(server: Server, llm: LLM) -> None:
    asked = dict(max_tokens=5, temperature=0)
    prompts: list[Any] = ["ab", "cd"]
    expected = [out.text for out in llm.generate(prompts, SamplingParams(**asked), use_tqdm=False)]  # type: ignore[arg-type]
    for given in (prompts, [llm.get_tokenizer().encode(p) for p in prompts]):
        body = post(server, prompt=given, n=2, **asked).json()
        usage, choices = body["usage"], body["choices"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2 + 2, 2 * 2 * 5)
        assert [c["index"] for c in choices] == [0, 1, 2, 3]
        assert [c["text"] for c in choices] == [t for t in expected for _ in range(2)]
        lines = post(server, prompt=given, stream=True, **asked).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        texts = {0: "", 1: ""}
        for line in lines[:-2]:
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            texts[choice["index"]] += choice["text"]
        assert list(texts.values()) == expected


def test_echo_has_the_prompts_logprobs(server: Server) -> None:
    asked: dict[str, Any] = dict(prompt="abc", max_tokens=2, temperature=0, echo=True, logprobs=1)
    (choice,) = post(server, **asked).json()["choices"]
    likely = choice["logprobs"]
    assert choice["text"].startswith("abc") and likely["tokens"][:3] == ["a", "b", "c"]
    assert likely["token_logprobs"][0] is None and likely["top_logprobs"][0] is None
    assert len(likely["token_logprobs"]) == 5 and likely["text_offset"][:4] == [0, 1, 2, 3]
    (same,) = post(server, **{**asked, "prompt": [97, 98]}).json()["choices"]
    assert len(same["logprobs"]["tokens"]) == 4
    (cut,) = post(server, **asked, truncate_prompt_tokens=2).json()["choices"]
    assert cut["text"].startswith("bc") and cut["logprobs"]["tokens"][:2] == ["b", "c"]
    asked |= dict(stream=True, n=2, truncate_prompt_tokens=2, logprobs=None)
    texts = {0: "", 1: ""}
    for line in post(server, **asked).text.split("\n\n")[:-2]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        texts[choice["index"]] += choice["text"]
    assert all(text == cut["text"] for text in texts.values())


def test_prompt_logprobs_are_with_each_completion(server: Server, llm: LLM) -> None:
    """Those of each prompt; of a chat they are beside the choices, as in vLLM."""
    prompts = ["abc", "cd"]
    asked: dict[str, Any] = dict(max_tokens=1, temperature=0, prompt_logprobs=1)
    choices = post(server, prompt=prompts, n=2, **asked).json()["choices"]
    params = SamplingParams(**asked)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for choice, output in zip(choices, [outputs[0]] * 2 + [outputs[1]] * 2, strict=True):
        found, want = choice["prompt_logprobs"], output["prompt_logprobs"]
        assert want is not None and found[0] is want[0] is None and len(found) == len(want)
        for tokens, others in zip(found[1:], want[1:], strict=True):
            assert [token["token_id"] for token in tokens] == [one.token_id for one in others]
    (choice,) = (chat := post(server, CHAT, messages=HI, **asked).json())["choices"]
    assert "prompt_logprobs" not in choice and len(chat["prompt_logprobs"]) > 2
    (choice,) = post(server, prompt="abc", max_tokens=1).json()["choices"]
    assert "prompt_logprobs" not in choice


BAD: list[tuple[str, Any, int, str]] = [
    ("/v1/completions", dict(prompt="a", temprature=1), 400, "did you mean 'temperature'?"),
    ("/v1/completions", dict(prompt="a", temperature="hot"), 400, "temperature must be"),
    ("/v1/completions", dict(), 400, "prompt is missing"),
    ("/v1/completions", dict(prompt=[]), 400, "prompt must have 1 to"),
    ("/v1/completions", dict(prompt=[[]]), 400, "prompt must have 1 to"),
    (
        "/v1/completions", dict(prompt="a", model="gpt"), 404,
        "model 'gpt' does not exist; this server has: tiny, t",
    ),
    (
        "/v1/completions", dict(prompt=["a"] * 1100), 400, "prompts times n must be at most 1032"
        " (max_num_seqs and max_waiting), got 1100 times 1",
    ),
    ("/v1/completions", dict(prompt=["a", ""]), 400, "prompt[1]: prompt must have 1 to"),
    ("/v1/completions", dict(prompt=["a", ""], stream=True), 400, "prompt[1]: prompt must have"),
    (
        "/v1/completions", dict(prompt=["a", 5]), 400,
        "prompt must be all token ids, or all texts and arrays of token ids",
    ),
    (
        "/v1/chat/completions", dict(messages=[*HI, {"role": "user"}]), 400,
        "messages[1].content must be a text or parts of text, got null",
    ),
    ("/v1/chat/completions", dict(messages=[{"role": "user", "content": 5}]), 400, "got 5"),
    ("/tokenize", dict(), 400, "prompt or messages is missing"),
    ("/v1/completions", dict(prompt="a", echo=True, logprobs=1, stream=True), 400, "echo with"),
    ("/v1/completions", dict(prompt="a", model=5), 400, "model must be a text, got 5"),
    ("/v1/completions", dict(prompt="a", stream=1), 400, "stream must be true or false, got 1"),
    ("/v1/completions", dict(prompt="a", stream_options={}), 400, "needs stream to be true"),
    ("/v1/completions", dict(prompt="a", stream=True, stream_options={"x": 1}), 400, "field 'x'"),
    ("/v1/completions", dict(prompt="a" * 10**5), 400, "max_model_len"),
    ("/v1/completions", dict(prompt="a" * 2 * 10**6), 413, "at most 1 MiB"),
    ("/v1/completions", dict(prompt="a", response_format={"type": "x"}), 400, "response_format"),
    ("/v1/completions", dict(prompt="a", guided_regex="(", stream=True), 400, "guided_regex: reg"),
    ("/v1/completions", dict(prompt=["a", "b"], guided_regex="("), 400, "guided_regex: regex"),
    (
        "/v1/chat/completions", dict(messages=HI, response_format=dict(type="json_schema",
        json_schema={"name": "x", "schema": {"type": "foo"}})), 400, "response_format: json",
    ),
    (
        "/v1/completions", dict(prompt="a", structured_outputs={"regex": "("}, stream=True), 400,
        "structured_outputs: regex",
    ),
    ("/v1/chat/completions", dict(messages="a"), 400, "messages must be an array"),
    ("/v1/chat/completions", dict(messages=[{}]), 400, 'must be an object with a "role"'),
    ("/v1/chat/completions", dict(messages=HI, prompt="a"), 400, "a chat has messages"),
    ("/v1/chat/completions", dict(messages=HI, tools=[1]), 400, "tools[0] must be"),
    ("/v1/embeddings", dict(), 400, "input is missing"),
    ("/v1/embeddings", dict(input=""), 400, "input must not be empty"),
    ("/v1/embeddings", dict(input=["a", 5]), 400, "input"),
    ("/v1/embeddings", dict(input=[[1], [999]]), 400, "input[1]: prompt token id"),
    ("/v1/embeddings", dict(input="a", model="x"), 404, "model 'x' does not exist"),
    ("/v1/embeddings", dict(input="a", dimensions=65), 400, "dimensions must be in [1, 64]"),
    ("/v1/embeddings", dict(input="a", encoding_format="x"), 400, "encoding_format must be one"),
    ("/v1/embeddings", dict(input="a", temperature=1), 400, "unknown field 'temperature'"),
    ("/v1/embeddings", dict(input=["a"] * 2049), 400, "at most 2048 inputs (max_inputs), got 2049"),
    ("/score", dict(text_1="a", text_2=["b"] * 3000), 400, "(max_inputs), got 3000"),
    ("/rerank", dict(query="a", documents=["b"] * 3000), 400, "(max_inputs), got 3000"),
    ("/v1/embeddings", dict(input=3), 400, "input must be a text, token ids or an array of these"),
    ("/score", dict(text_1=3, text_2="a"), 400, "text_1 must be a text, token ids or an array"),
    ("/score", dict(text_1="a", text_2=[]), 400, "text_2 must not be empty, got []"),
    ("/rerank", dict(query="", documents=["b"]), 400, 'query must not be empty, got ""'),
    ("/rerank", dict(query="a", documents=["b"], top_n=0), 400, "top_n must be"),
    ("/score", dict(text_1="a"), 400, "documents is missing"),
    ("/score", dict(text_1="a", queries="a", text_2="b"), 400, "another name of queries"),
    ("/v1/score", dict(text_1=["a", "b"], text_2="b"), 400, "queries must be one or as many"),
    ("/start_profile", dict(), 400, "start_profile writes into profiler_dir"),
    ("/stop_profile", dict(), 400, "no profile is being recorded"),
    ("/rerank", dict(query="a", documents=[]), 400, "documents must be an array that is not"),
    ("/rerank", dict(query="a", documents=["b", 5]), 400, "documents[1] must be a text"),
    ("/rerank", dict(query="a", documents=["b"], top_n=-1), 400, "top_n must be"),
    ("/v1/nothing", dict(), 404, "there is no path '/v1/nothing'"),
    ("/v1/completion", dict(), 404, "no path '/v1/completion'; did you mean '/v1/completions'?"),
    ("/v1/completions/", dict(), 404, "'/v1/completions/'; did you mean '/v1/completions'?"),
    ("/v1/models", dict(), 405, "/v1/models takes GET, HEAD, got POST"),
    ("/wake_up", dict(), 404, "there is no path '/wake_up' (--sleep-endpoints adds it)"),
    ("/v1/completions", dict(prompt={"prompt": "x"}), 400, 'these, got {"prompt": "x"}'),
    ("/v1/completions", dict(prompt="a", echo=1), 400, "echo must be true or false, got 1"),
    ("/v1/completions", dict(prompt="a", ignore_eos="no"), 400, 'must be true or false, got "no"'),
    ("/v1/completions", dict(prompt="a", model=["x"]), 400, 'model must be a text, got ["x"]'),
    (
        "/v1/completions", dict(prompt="a", prompt_logprobs=21), 400,
        "prompt_logprobs must be at most 20 (max_logprobs), got 21",
    ),
    ("/v1/completions", dict(prompt="a", logprobs=259), 400, "logprobs must be at most 20 (max_"),
    (
        "/v1/chat/completions", dict(messages=HI, logprobs=True, top_logprobs=21), 400,
        "top_logprobs must be at most 20 (max_logprobs), got 21",
    ),
    (
        "/v1/completions", dict(prompt="a", stop=["a"] * 65), 400,
        "stop must have at most 64 texts (max_stops), got 65",
    ),
    (
        "/v1/completions", dict(prompt="a", bad_words=["a"] * 10_001), 400,
        "bad_words must have at most 10000 texts (max_bad_words), got 10001",
    ),
    (
        "/v1/chat/completions", dict(messages=HI, stop=["a" * 4000, "b" * 97]), 400,
        "stop must have at most 4096 characters in all (max_stop_chars), got 4097",
    ),
    (
        "/v1/completions", dict(prompt="a", structured_outputs=dict(regex="a" * (256 << 10))), 400,
        "structured_outputs must have at most 256 KiB (max_grammar_kib), got 257",
    ),
    (
        "/v1/chat/completions",
        dict(messages=HI, response_format=dict(type="json_schema", json_schema="a" * (300 << 10))),
        400, "response_format must have at most 256 KiB (max_grammar_kib), got 301",
    ),
    (
        "/v1/completions", dict(prompt="a", prompt_logprobs=0, stream=True), 400,
        "prompt_logprobs must not be streamed",
    ),
    (
        "/v1/chat/completions", dict(messages=[{"role": "bot", "content": "a"}]), 400,
        "role must be one of 'system', 'developer', 'user', 'assistant', 'tool', got \"bot\"",
    ),
    (
        "/v1/chat/completions", dict(messages=HI, tools=TOOLS, parallel_tool_calls=0), 400,
        "parallel_tool_calls must be true or false, got 0",
    ),
    (
        "/v1/completions", dict(prompt="a", stop_token_ids=[0] * 5000), 400,
        "ids (vocab_size), got 5000",
    ),
    ("/tokenize", dict(prompt=5), 400, "prompt must be a text, got 5"),
    ("/tokenize", dict(prompt="a", model="x"), 404, "'x' does not exist"),
    ("/tokenize", dict(messages=HI, model="x"), 404, "'x' does not exist"),
    ("/tokenize", dict(prompt="a", return_token_strs=1), 400, "must be true or false, got 1"),
    ("/tokenize", dict(prompt="a", return_token_strs=0), 400, "must be true or false, got 0"),
    ("/tokenize", dict(prompt="a", return_token_strs=""), 400, 'must be true or false, got ""'),
    *[("/v1/chat/completions", dict(messages=HI, chat_template_kwargs=value), 400,
       "chat_template_kwargs must be an object, got") for value in (0, False, "", [])],
    ("/detokenize", dict(tokens=[1], model="x"), 404, "'x' does not exist"),
    ("/detokenize", dict(), 400, "tokens is missing"),
    ("/detokenize", dict(tokens="a"), 400, "tokens must be an array of token ids"),
    ("/detokenize", dict(tokens=[10**9]), 400, "token id"),
    ("/v1/embeddings", dict(input=["a", 7]), 400, "input must be all token ids, or all texts"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "words"), BAD)
def test_bad_requests_get_their_status(
    server: Server, path: str, body: Any, status: int, words: str
) -> None:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=LIMIT)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert words in error["message"] and set(error) == {"message", "type", "param", "code"}
    name = error["message"].split(" must ")[0]
    if status == 400 and name.isidentifier():
        assert error["param"] == ("messages" if name == "prompt" and "chat" in path else name)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": "a", "prompt": "b"}', b"[" * 10**5, b"NaN"]
)
def test_bodies_that_are_no_objects(server: Server, data: bytes) -> None:
    response = httpx.post(f"{server.url}/v1/completions", content=data, timeout=LIMIT)
    assert response.status_code == 400 and "the body" in response.json()["error"]["message"]


def test_a_large_body_of_unknown_length_is_refused(server: Server) -> None:
    """It comes in chunks, and no more of it is read than a body may have."""
    parts = (b" " * 10**6 for _ in range(3))
    found = httpx.post(f"{server.url}/v1/completions", content=parts)
    assert (found.status_code, found.json()["error"]["code"]) == (413, "body_too_large")


def test_openais_client_gets_embeddings(server: Server, client: openai.OpenAI, llm: LLM) -> None:
    """It asks for base64 by itself."""
    texts = [f"text {i}" for i in range(30)]  # more than may run at once
    want = [output.embedding for output in llm.embed(texts, use_tqdm=False)]
    ids = [llm.tokenizer.encode(text) for text in texts]
    asked: list[Any] = [texts, ids, texts[0], ids[0]]
    for given in asked:
        for kind in ({}, {"encoding_format": "float"}):
            found = client.embeddings.create(model="tiny", input=given, **kind)  # type: ignore
            assert found.model == "tiny"
            assert found.usage.prompt_tokens == found.usage.total_tokens > 0
            for index, item in enumerate(found.data):
                assert item.index == index
                assert item.embedding == pytest.approx(want[index], abs=1e-5)
    (cut,) = client.embeddings.create(model="t", input="a", dimensions=7).data
    assert len(cut.embedding) == 7
    wait_for_rest(server)


def test_scores_and_rankings(server: Server, llm: LLM) -> None:
    texts = ["a", "b c", "zz top", "a b"]
    want = [output.score for output in llm.score("a b", texts, use_tqdm=False)]
    for path in ("/score", "/v1/score"):
        for names in (("text_1", "text_2"), ("queries", "documents")):
            found = post(server, path, **dict(zip(names, ("a b", texts), strict=True))).json()
            assert [item["score"] for item in found["data"]] == pytest.approx(want, abs=1e-5)
    assert found["usage"]["total_tokens"] == sum(3 + len(text) for text in texts)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        documents = [texts[0], {"text": texts[1]}, *texts[2:]]
        found = post(server, path, query="a b", documents=documents, top_n=3).json()
        order = sorted(range(4), key=lambda index: -want[index])[:3]
        assert [item["index"] for item in found["results"]] == order
        assert [item["document"]["text"] for item in found["results"]] == [texts[i] for i in order]
    assert order[0] == 3 and found["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-5)


def test_a_client_that_leaves_ends_its_embeddings(server: Server) -> None:
    before = metric(server, "prompt_tokens_total")
    with sent(server, {"input": ["a" * 500] * 1500}, "/v1/embeddings"):
        wait_for_work(server)
    wait_for_rest(server)
    assert metric(server, "prompt_tokens_total") - before < 1500 * 500
    assert post(server, "/v1/embeddings", input="a").status_code == 200


def test_what_describes_the_server(server: Server, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "t"]
    assert client.models.retrieve("t").id == "t"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("x")
    assert httpx.get(f"{server.url}/health", timeout=LIMIT).status_code == 200
    assert "version" in httpx.get(f"{server.url}/version", timeout=LIMIT).json()
    assert "html" in httpx.get(server.url, timeout=LIMIT).headers["content-type"]
    assert httpx.get(f"{server.url}/v1/completions", timeout=LIMIT).status_code == 405
    tokens = post(server, "/tokenize", prompt="abc", return_token_strs=True).json()
    assert (tokens["count"], tokens["tokens"]) == (3, [ord(c) - 33 for c in "abc"])
    assert post(server, "/detokenize", tokens=tokens["tokens"]).json() == {"prompt": "abc"}
    absent = dict(model=None, messages=None, add_special_tokens=None, return_token_strs=None)
    assert post(server, "/tokenize", prompt="abc", **absent).json()["tokens"] == tokens["tokens"]
    found = post(server, "/detokenize", tokens=tokens["tokens"], model=None, user=None)
    assert found.json() == {"prompt": "abc"}
    chat = post(server, "/tokenize", messages=HI, prompt=None).json()
    assert chat["count"] == len("user:Hi;<tool_call>")
    long = [dict(role="user", content="ab" * 60_000)]  # no completion: the model takes less
    assert post(server, "/tokenize", messages=long).json()["count"] > 120_000
    metrics = httpx.get(f"{server.url}/metrics", timeout=LIMIT)
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "vllm:time_to_first_token_seconds_bucket{" in metrics.text
    assert 'vllm:num_requests_running{model_name="tiny"} ' in metrics.text  # the served name


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_streams(server: Server) -> None:
    command = ["curl", "-sN", f"{server.url}/v1/completions", "-d", '{"prompt":"a","stream":true}']
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    assert done.stdout.startswith("data: {") and done.stdout.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(server: Server, stream: bool) -> None:
    before = metric(server, "generation_tokens_total")
    with sent(server, {**LONG, "stream": stream}) as raw:
        if stream:
            assert raw.recv(20).startswith(b"HTTP/1.1 200 OK")
        wait_for_work(server)
    wait_for_rest(server)
    assert metric(server, "generation_tokens_total") - before < LONG["max_tokens"]


def test_a_client_that_never_reads_delays_nobody(server: Server) -> None:
    with sent(server, {**LONG, "stream": True, "logprobs": 5}) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        for _ in range(5):
            assert post(server, prompt="a", max_tokens=5).status_code == 200
    wait_for_rest(server)


def test_many_clients_get_the_answers_of_generate(server: Server, llm: LLM) -> None:
    """64 at a time, a third of whom leave."""
    rng = random.Random(3)
    bodies = [
        dict(prompt=[rng.randrange(250) for _ in range(rng.randrange(1, 40))], seed=seed,
             max_tokens=rng.randrange(1, 40), temperature=1.0)
        for seed in range(64)
    ]  # fmt: skip
    params = [SamplingParams(**{k: v for k, v in b.items() if k != "prompt"}) for b in bodies]  # type: ignore[arg-type]
    expected = llm.generate([b["prompt"] for b in bodies], params, use_tqdm=False)  # type: ignore[misc]

    async def ask(client: httpx.AsyncClient, index: int) -> Any:
        url, body = f"{server.url}/v1/completions", bodies[index]
        if index % 3 == 0:
            task = asyncio.create_task(client.post(url, json={**body, "max_tokens": 500}))
            await asyncio.sleep(rng.random() / 2)
            task.cancel()
            return None
        if index % 3 == 1:
            return (await client.post(url, json=body)).json()["choices"][0]["text"]
        text = ""
        async with client.stream("POST", url, json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    async def everyone() -> Any:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(timeout=LIMIT, limits=limits) as client:
            return await asyncio.gather(*(ask(client, index) for index in range(64)))

    for index, text in enumerate(asyncio.run(everyone())):
        assert text is None or text == expected[index].text, index
    wait_for_rest(server)


def test_requests_are_logged_without_prompts(server: Server) -> None:
    name = post(server, prompt="secret", max_tokens=2, ignore_eos=True).json()["id"]
    assert post(server, prompt="secret", max_tokens="secret").status_code == 400
    line = server.line_with(name.removeprefix("cmpl-"))
    assert re.search(r"/v1/completions \S+ 200 6\+2 tokens first [\d.]+ ms, [\d.]+ ms length", line)
    assert "secret" not in server.text


def test_responses_have_the_id_that_is_in_the_log(server: Server) -> None:
    bodies: list[dict[str, Any]] = [
        dict(prompt="a", max_tokens=1), dict(prompt="a", max_tokens=1, stream=True), dict(),
    ]  # fmt: skip
    for body in bodies:
        response = post(server, **body)
        name = response.headers["x-request-id"]
        line = server.line_with(name)
        assert f"/v1/completions {name} {response.status_code} " in line
        assert name in response.text or response.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_times_in_the_log_begin_when_a_request_does(server: Server, stream: bool) -> None:
    """The body comes 50 ms after the server has asked for it, or later."""
    body = json.dumps({"prompt": "a", "max_tokens": 2, "stream": stream}).encode()
    with begun(server, body) as raw:
        time.sleep(0.05)
        raw.sendall(body)
        head = raw.makefile().read()
    name = re.search("x-request-id: (.*)", head)[1]  # type: ignore[index]
    line = server.line_with(name)
    first, whole = (float(ms) for ms in re.findall(r"([\d.]+) ms", line))
    assert 50 <= first <= whole


def test_keys_limits_and_proxies(long_model: Path, tmp_path: Path) -> None:
    arguments = (
        "--api-key", "k1", "--api-key", "k2", "--max-num-seqs", "1", "--max-waiting", "0",
        "--cors-origin", ORIGIN["Origin"],
    )  # fmt: skip
    with serving(tmp_path / "log", str(long_model), *arguments) as server:
        url = f"{server.url}/v1/completions"
        for headers in ({}, {"Authorization": "Bearer k"}, {"Authorization": "k1"}):
            refused = httpx.post(
                url, json={"prompt": "a"}, headers={**headers, **ORIGIN}, timeout=LIMIT
            )
            assert refused.status_code == 401 and refused.json()["error"]["code"]
            assert refused.headers["access-control-allow-origin"] == ORIGIN["Origin"]
        assert httpx.get(f"{server.url}/health", timeout=LIMIT).status_code == 200
        headers = {"Authorization": "Bearer k2", **ORIGIN}
        answer = httpx.post(url, json={"prompt": "a"}, headers=headers, timeout=LIMIT)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == ORIGIN["Origin"]
        slow = LONG | {"max_tokens": 15_000, "stream": True}
        with httpx.stream("POST", url, json=slow, headers=headers, timeout=LIMIT) as running:
            assert running.status_code == 200
            full = httpx.post(url, json={"prompt": "a"}, headers=headers, timeout=LIMIT)
        assert full.status_code == 429 and full.headers["retry-after"] == "1"
        assert "max_waiting=0" in full.json()["error"]["message"]


def test_sigterm_drains(long_model: Path, tmp_path: Path) -> None:
    """A running stream goes on to its end, a new request is refused, and the status is 0."""
    arguments = ("--cors-origin", ORIGIN["Origin"], *PATIENT)
    with serving(tmp_path / "log", str(long_model), *arguments) as server:
        chunks: list[str] = []

        def read() -> None:
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", timeout=LIMIT,
                json={**LONG, "max_tokens": 1500, "stream": True},
            ) as response:  # fmt: skip
                chunks.extend(response.iter_lines())

        with httpx.Client(timeout=LIMIT) as kept:
            kept.get(f"{server.url}/health")
            reader = threading.Thread(target=read)
            reader.start()
            wait_until("the stream does not begin", lambda: chunks)
            server.process.send_signal(signal.SIGTERM)
            refused = wait_until_draining(server, kept, headers=ORIGIN)
        assert "retry-after" in refused.headers
        assert refused.headers["access-control-allow-origin"] == ORIGIN["Origin"]
        reader.join()
        assert chunks[-2] == "data: [DONE]"
        assert server.process.wait(LIMIT) == 0


def test_a_request_that_has_begun_is_drained(long_model: Path, tmp_path: Path) -> None:
    """Its body comes after the signal."""
    with serving(tmp_path / "log", str(long_model), *PATIENT) as server:
        body = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
        with begun(server, body) as raw:
            server.process.send_signal(signal.SIGTERM)
            assert server.line_with("draining").endswith("requests being answered: 1")
            raw.sendall(body)
            assert raw.recv(20).startswith(b"HTTP/1.1 200 OK")
        assert server.process.wait(LIMIT) == 0


def test_templates_of_requests_are_refused(server: Server) -> None:
    """A template is a program, which may never end."""
    for given in ({"chat_template": "x"}, 5):
        for path in ("/v1/chat/completions", "/tokenize"):
            response = post(server, path, messages=HI, chat_template_kwargs=given)
            assert response.status_code == 400
            words = "takes no templates" if given != 5 else "chat_template_kwargs must be an object"
            assert words in response.json()["error"]["message"]


def test_nothing_to_draw_is_a_bad_request(server: Server) -> None:
    asked: dict[str, Any] = dict(
        prompt="a", structured_outputs={"choice": ["ab"]}, bad_words=["ab", "a", "b"]
    )
    for stream in (False, True):
        response = post(server, **asked, stream=stream)
        assert response.status_code == 400
        assert "leave no token to draw" in response.json()["error"]["message"]


def test_what_is_not_drained_in_time_gets_503(long_model: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "log", str(long_model), "--drain-seconds", "0.2") as server:
        responses: list[httpx.Response] = []
        body = {**LONG, "max_tokens": 15_000}
        asking = threading.Thread(
            target=lambda: responses.append(post(server, **body)), daemon=True
        )
        asking.start()
        wait_for_work(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT) == 0
        asking.join()
        assert responses[0].status_code == 503
        assert responses[0].json()["error"]["message"].startswith("the server has ended before")
        assert "Traceback" not in server.text


def test_a_socket_that_is_left_is_replaced(tmp_path: Path) -> None:
    place = tmp_path / "socket"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(place))
    left.close()
    with serving(tmp_path / "log", "--uds", str(place)):
        assert place.is_socket()


def test_a_second_signal_ends_at_once(long_model: Path, tmp_path: Path) -> None:
    """The stream that still runs is cut off."""
    with serving(tmp_path / "log", str(long_model), *PATIENT) as server:
        endless = {**LONG, "max_tokens": 15_000, "stream": True, "n": 8}
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=endless, timeout=LIMIT) as slow:
            lines = slow.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            server.line_with("draining")
            server.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(httpx.HTTPError):
                assert "data: [DONE]" not in lines
            assert server.process.wait(LIMIT) == 0


def test_health_of_an_engine_that_hangs(tmp_path: Path) -> None:
    with serving(tmp_path / "log", EMBEDDED_MODEL, "--health-seconds", "0.5") as server:
        url = f"{server.url}/health"
        wait_until("it is not healthy", lambda: httpx.get(url, timeout=LIMIT).status_code == 200)
        (engine,) = server.children()
        os.kill(engine, signal.SIGSTOP)
        try:
            hung = httpx.get(url, timeout=LIMIT)
        finally:
            os.kill(engine, signal.SIGCONT)
        assert hung.status_code == 503 and hung.json()["error"]["code"] == "engine_hangs"
        assert "has not answered for 0.5 s" in hung.json()["error"]["message"]
        wait_until("it stays ill", lambda: httpx.get(url, timeout=LIMIT).status_code == 200)
        assert httpx.get(f"{server.url}/metrics", timeout=LIMIT).status_code == 200


def test_a_dead_engine_ends_the_server(long_model: Path, tmp_path: Path) -> None:
    import os

    with serving(tmp_path / "log", str(long_model)) as server:
        statuses: list[int] = []

        def ask() -> None:
            body = {**LONG, "max_tokens": 15_000, "n": 8}
            response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=LIMIT)
            statuses.append(response.status_code)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_for_work(server)
        (engine,) = server.children()
        os.kill(engine, signal.SIGKILL)
        asking.join()
        assert server.process.wait(LIMIT) == 1
        assert statuses == [503]
        assert "the engine has ended: rank 0, the engine's process, was killed by" in server.text
        assert "Traceback" not in server.text


def test_a_unix_socket(tmp_path: Path) -> None:
    place = tmp_path / "socket"
    with serving(tmp_path / "log", "--uds", str(place)) as server:
        assert server.url == f"unix:{place}"
        transport = httpx.HTTPTransport(uds=str(place))
        with httpx.Client(transport=transport, timeout=LIMIT) as client:
            asked = {"messages": [{"role": "user", "content": "12+34="}], "temperature": 0}
            answer = client.post("http://x/v1/chat/completions", json=asked).json()
        assert answer["choices"][0]["message"]["content"] == "46"
        assert answer["model"] == EMBEDDED_MODEL
    assert not place.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--port", "70000"), "port must be in [0, 65535], got 70000"),
        (("--host", "999.1.1.1"), "cannot listen at http://999.1.1.1:"),
        (("--ssl-keyfile", "x"), "--ssl-keyfile needs --ssl-certfile"),
        (("--ssl-certfile", "/nope"), "--ssl-certfile and --ssl-keyfile cannot be used"),
        (("/nope/model",), "/nope/model"),
        (("a", "--model", "b"), "MODEL and --model exclude each other"),
    ],
)
def test_bad_arguments_are_one_line(arguments: tuple[str, ...], words: str) -> None:
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "nanovllm", "serve", *OPTIONS, *arguments],
        capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode in (1, 2) and len(done.stderr.splitlines()) == 1
    assert words in done.stderr
