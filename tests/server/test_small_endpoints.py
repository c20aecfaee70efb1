"""/pooling, /tokenizer_info, /ping, /load, /openapi.json, /docs and others, of one application."""

import asyncio
import base64
import json
import re
import struct
import threading
from collections.abc import Coroutine, Iterator
from html.parser import HTMLParser
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.routing import Route
from waiting import LIMIT

from nanovllm.async_llm import AsyncLLM
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.openai.fields import CHAT, KNOWN, OTHERS
from nanovllm.openai.pooling import (
    NUMBERS_AT_ONCE,
    joined_body,
    parse_pooling,
    pooling_entry,
)
from nanovllm.server.app import make_app
from nanovllm.server.described.bodies import BODIES
from nanovllm.server.options import ServerOptions
from nanovllm.server.serve import default_params

KEY = "secret-key"
AUTH = {"Authorization": f"Bearer {KEY}"}


class Served:
    """The application in this process, with a key, and one loop for all tests."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._llm = AsyncLLM(
            EMBEDDED_MODEL, device="cpu", dtype="float32", cpu_kvcache_gib=0.05, max_num_seqs=8
        )
        options = ServerOptions(
            api_key=[KEY], sleep_endpoints=True, ssl_certfile="/c/cert", ssl_keyfile="/c/key",
            cors_origin=["https://a.example"], max_inputs=4,
            max_state_numbers=1 << 13,
        )  # fmt: skip
        self.app, self.guard = make_app(self._llm, options, default_params(self._llm, {}))
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://test", timeout=LIMIT
        )

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    def get(self, path: str, **options: Any) -> httpx.Response:
        found: httpx.Response = self.run(self.client.get(path, **options))
        return found

    def post(self, path: str, **body: Any) -> httpx.Response:
        found: httpx.Response = self.run(self.client.post(path, json=body, headers=AUTH))
        return found

    def close(self) -> None:
        self.run(self.client.aclose())
        self.run(self._llm.aclose())
        self._runner.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


def numbers(text: str) -> list[float]:
    data = base64.b64decode(text)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def test_pooling_has_the_vectors_of_embeddings(served: Served) -> None:
    options = dict(input=["1+1=", "12+34="], dimensions=8)
    expected = [one["embedding"] for one in served.post("/v1/embeddings", **options).json()["data"]]
    found = served.post("/pooling", task="embed", **options).json()
    assert [one["data"] for one in found["data"]] == expected
    assert [(one["object"], one["index"]) for one in found["data"]] == [
        ("pooling", 0),
        ("pooling", 1),
    ]
    assert found["id"].startswith("pool-") and found["object"] == "list"
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 0
    coded = served.post("/pooling", task="embed", encoding_format="base64", **options).json()
    assert numbers(coded["data"][1]["data"]) == pytest.approx(expected[1])


def test_pooling_has_the_states_of_all_tokens_by_default(served: Served) -> None:
    """They are not normalized; those of the last token are also had alone."""
    found = served.post("/pooling", input="12+34=").json()
    (states,) = [one["data"] for one in found["data"]]
    assert len(states) == found["usage"]["prompt_tokens"]
    last = served.post("/pooling", input="12+34=", pooling="last").json()["data"][0]["data"]
    assert last == pytest.approx(states[-1], rel=1e-4, abs=1e-5)
    assert sum(x * x for x in last) != pytest.approx(1, rel=1e-2)
    coded = served.post("/pooling", input="12+34=", encoding_format="base64").json()
    flat = [x for state in states for x in state]
    assert numbers(coded["data"][0]["data"]) == pytest.approx(flat, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("shape", [(7,), (1, 3), (700, 64)], ids=str)
def test_states_are_written_in_parts(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between which other threads run: the states of a long text are many megabytes."""
    monkeypatch.setattr("nanovllm.openai.pooling.CODED_AT_ONCE", 3 << 14)
    values = np.random.default_rng(0).random(shape, np.float32)
    many = values.size > NUMBERS_AT_ONCE
    for kind in ("float", "base64"):
        _, asked = parse_pooling({"input": "a", "encoding_format": kind})
        entry = list(pooling_entry(asked, 5, values))
        assert (len(entry) > 4) == many
        body = json.loads(joined_body({"a": 1}, [entry, entry]))
        assert body["a"] == 1 and [one["index"] for one in body["data"]] == [5, 5]
        data = body["data"][1]["data"]
        found = numbers(data) if kind == "base64" else data
        assert np.array_equal(np.array(found, np.float32).reshape(shape), values)


def test_a_thread_writes_long_states(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def entry(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return pooling_entry(*given)

    monkeypatch.setattr("nanovllm.server.pooling.pooling_entry", entry)
    for number in (1, 40):
        assert served.post("/pooling", input="1" * number).status_code == 200
    assert [one is threading.main_thread() for one in threads] == [True, False]


@pytest.mark.parametrize(
    "more",
    [
        {"priority": 0}, {"truncation_side": "left"}, {"add_special_tokens": True},
        {"use_activation": False, "task": "embed"}, {"request_id": "mine"},
    ],
)  # fmt: skip
def test_pooling_takes_the_fields_of_embeddings(served: Served, more: dict[str, Any]) -> None:
    vector = {name: value for name, value in more.items() if name != "task"}
    expected = served.post("/v1/embeddings", input="1+1=", **vector).json()["data"][0]["embedding"]
    found = served.post("/pooling", input="1+1=", **({"task": "embed"} | more))
    assert found.json()["data"][0]["data"] == expected
    if "request_id" in more:
        assert found.headers["x-request-id"] == "mine" and found.json()["id"] == "pool-mine"


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "input is missing"),
        ({"input": "1", "task": "classify"}, 400, "task must be one of 'embed', 'token_embed'"),
        ({"input": "1", "normalize": True}, 400, 'normalize needs \\"task\\": \\"embed\\"'),
        ({"input": "1", "use_activation": True}, 400, "use_activation needs"),
        ({"input": "1", "priority": 1}, 400, "it is for chats and completions"),
        ({"input": "1", "task": "embed", "pooling": "all"}, 400, "pooling must be"),
        ({"input": "1", "encoding_format": "int"}, 400, "encoding_format must be one of"),
        ({"input": ["1"] * 5}, 400, "at most 4 inputs (max_inputs), got 5"),
        ({"input": ["1" * 20] * 4}, 400, "at most 8192 numbers (max_state_numbers), got 8"),
        ({"input": "1", "model": "x"}, 404, "does not exist"),
        ({"input": "1", "data": 1}, 400, "unknown field 'data'"),
    ],
)
def test_bad_bodies_of_pooling_name_the_field(
    served: Served, body: dict[str, Any], status: int, words: str
) -> None:
    found = served.post("/pooling", **body)
    assert (found.status_code, words in found.text) == (status, True), found.text


def test_classify_says_that_there_is_no_head(served: Served) -> None:
    found = served.post("/classify", input="1")
    assert found.status_code == 400
    assert "no classification head" in found.json()["error"]["message"]


def test_ping_answers_as_health_and_without_a_key(served: Served) -> None:
    assert served.get("/ping").status_code == 200
    assert served.run(served.client.post("/ping")).status_code == 200


def test_load_counts_requests_that_do_work(served: Served) -> None:
    """Not those of who asks, or of the page."""

    async def loads() -> list[int]:
        async def load() -> int:
            return int((await served.client.get("/load")).json()["server_load"])

        found = [await load()]
        body = dict(prompt="1+1=", ignore_eos=True, max_tokens=3000)
        task = asyncio.create_task(served.client.post("/v1/completions", json=body, headers=AUTH))
        while not served.guard.clients.counts:
            await asyncio.sleep(0)
        found.append(await load())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [*found, await load()]

    assert served.run(loads()) == [0, 1, 0]


def test_tokenizer_info_has_what_lm_eval_reads(served: Served) -> None:
    """It makes prompts of chats and cuts contexts with `tokenizer_backend=remote`."""
    assert served.get("/tokenizer_info").status_code == 401
    info = served.get("/tokenizer_info", headers=AUTH).json()
    assert info["eos_token"] == "<|im_end|>" and info["bos_token"] is None
    assert "messages" in info["chat_template"] and info["tokenizer_class"]
    (eos,) = served.post("/tokenize", prompt=info["eos_token"], add_special_tokens=False).json()[
        "tokens"
    ]
    assert served.post("/detokenize", tokens=[eos]).json()["prompt"] == info["eos_token"]


def test_server_info_needs_the_key_and_shows_none(served: Served) -> None:
    assert served.get("/server_info").status_code == 401
    found = served.get("/server_info", headers=AUTH)
    info = found.json()
    assert info["models"] == [EMBEDDED_MODEL]
    assert info["engine"]["max_num_seqs"] == 8 and info["engine"]["dtype"] == "float32"
    assert info["server"]["cors_origin"] == ["https://a.example"]
    assert KEY not in found.text and "/c/" not in found.text


def test_every_route_is_described_and_references_lead_somewhere(served: Served) -> None:
    document = served.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    routes = {re.sub(r":\w+}", "}", route.path): route for route in served.app.routes
              if isinstance(route, Route)}  # fmt: skip
    assert set(document["paths"]) == set(routes)
    for path, methods in document["paths"].items():
        assert set(methods) == {one.lower() for one in routes[path].methods or () if one != "HEAD"}
        assert all(one["summary"] for one in methods.values())
        assert re.findall(r"{(\w+)", path) == [
            one["name"] for one in methods.get("get", {}).get("parameters", ())
        ]
    references = re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document))
    assert set(references) <= set(document["components"]["schemas"])
    names = [
        one["operationId"] for methods in document["paths"].values() for one in methods.values()
    ]
    assert len(names) == len(set(names))
    secured = {path for path, methods in document["paths"].items() if "security" in str(methods)}
    assert "/v1/models" in secured and not secured & {"/", "/ping", "/load", "/docs"}
    assert set(BODIES) <= set(routes), "a line for a path that does not exist"


@pytest.mark.parametrize("path", [path for path, body in BODIES.items() if body.names])
def test_the_described_fields_are_those_that_the_parser_knows(served: Served, path: str) -> None:
    """A field that is not described is an error, and no described one is unknown."""
    document = served.get("/openapi.json").json()
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    schema = document["components"]["schemas"][reference["schema"]["$ref"].rpartition("/")[2]]
    known = schema["properties"]
    assert set(schema.get("required", ())) <= set(known)
    if path.endswith("lora_adapter"):
        return  # this server lets nobody change adapters
    assert "unknown field 'x_y'" in served.post(path, x_y=1).text
    for name in known:
        body: dict[str, Any] = {name: {"a": 1}}
        if path == "/tokenize" and (name in KNOWN[CHAT] or name in OTHERS[CHAT]):
            body["messages"] = []
        assert "unknown field" not in served.post(path, **body).text


@pytest.mark.parametrize("path", [path for path, body in BODIES.items() if body.others])
def test_fields_with_few_values_are_described_by_these(served: Served, path: str) -> None:
    """`additionalProperties` is false: a client that checks its bodies may send nothing else."""
    document = served.get("/openapi.json").json()
    name = re.sub(r"\W", "_", path.strip("/"))
    known = document["components"]["schemas"][name]["properties"]
    for field, other in BODIES[path].others.items():
        assert known[field]["enum"] == [None, *(one for one in other.accepts if one is not None)]
        for value in known[field]["enum"]:
            body = {"messages": []} if path == "/tokenize" else {}
            text = served.post(path, **body, **{field: value}).text
            assert "unknown field" not in text and f"{field}=" not in text


def test_messages_have_their_own_errors_and_header_of_the_key(served: Served) -> None:
    document = served.get("/openapi.json").json()
    for path, name in (("/v1/messages", "MessagesError"), (CHAT, "Error")):
        operation = document["paths"][path]["post"]
        assert operation["security"] == [{"key": []}, {"key_header": []}]
        error = operation["responses"]["default"]["content"]["application/json"]["schema"]
        assert error["$ref"].endswith(f"/{name}")
        found = served.post(path, x_y=1).json()
        assert set(document["components"]["schemas"][name]["required"]) == set(found)
    header = document["components"]["securitySchemes"]["key_header"]["name"]
    assert served.get("/v1/models", headers={header: KEY}).status_code == 200


def test_fields_have_types_and_ranges(served: Served) -> None:
    document = served.get("/openapi.json").json()
    chat = document["components"]["schemas"]["v1_chat_completions"]
    fields = chat["properties"]
    assert chat["required"] == ["messages"] and chat["additionalProperties"] is False
    assert "must be" in fields["temperature"]["description"]
    assert fields["stop"]["maxItems"] == 64, "the server's limit"
    assert "logits_processors" not in fields, "only in Python"
    assert "text/event-stream" in document["paths"][CHAT]["post"]["responses"]["200"]["content"]


def test_the_page_of_the_description_needs_nothing_else(served: Served) -> None:
    """No script, no file, no address of another site; texts are escaped."""
    found = served.get("/docs")
    assert found.headers["content-type"].startswith("text/html")
    assert "POST /v1/chat/completions" in found.text and "GET /server_info" in found.text
    tags: list[str] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append(tag)
            assert not [value for name, value in attrs if name in ("src", "onload")]
            if tag == "a":
                assert dict(attrs)["href"] in ("openapi.json", "./")

    Parser().feed(found.text)
    assert "script" not in tags and "img" not in tags and "link" not in tags
    assert "://" not in found.text
    assert "&lt;think&gt;" in found.text or "<think>" not in found.text
