"""/v1/responses, by OpenAI's client, and what it is made of."""

import asyncio
import dataclasses
import functools
import re
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import httpx
import openai
import orjson
import pydantic
import pytest
from servers import Server
from waiting import LIMIT, wait_until

from nanovllm.engine.remote.readers import Readers
from nanovllm.openai.request import CHAT, APIRequest, parse_body
from nanovllm.server.chats.blocks import Block, BlockReader, Step
from nanovllm.server.chats.fields import renamed
from nanovllm.server.chats.form import Ending, Usage
from nanovllm.server.errors import APIError
from nanovllm.server.options import ServerOptions
from nanovllm.server.responses.endpoints import Responses
from nanovllm.server.responses.events import ResponseForm
from nanovllm.server.responses.items import messages_of
from nanovllm.server.responses.request import NAMES, ResponseRequest, parse_response
from nanovllm.server.responses.store import OVERHEAD, ResponseStore

SUM = "12+34="
SCHEMA = {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"], "additionalProperties": False,
}  # fmt: skip
TOOL: Any = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}
CALLS: Any = dict(
    model="adder", input=SUM, tools=[TOOL], tool_choice="required", parallel_tool_calls=False,
    temperature=0, max_output_tokens=100,
)  # fmt: skip


def client_of(server: Server, key: str = "k1") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, timeout=LIMIT, max_retries=0)


@pytest.fixture
def client(adder_server: Server) -> openai.OpenAI:
    return client_of(adder_server)


def streamed(client: openai.OpenAI, **asked: Any) -> tuple[list[Any], Any]:
    """The events of a response, and the response of the last one; their numbers must be right."""
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events, events[-1].response


def without_ids(response: Any) -> Any:
    """A response without what differs between equal ones."""
    body = response.to_dict()
    for item in (body, *body["output"]):
        for name in ("id", "call_id", "created_at", "parsed_arguments"):
            item.pop(name, None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
    body["usage"]["input_tokens_details"] = None
    return body


def test_text_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: Any = dict(
        model="adder", input=SUM, temperature=0, metadata={"a": "b"}, user="u", instructions="Add."
    )
    whole = client.responses.create(**asked)
    assert whole.output_text == "46" and whole.status == "completed" and whole.error is None
    assert whole.usage is not None and whole.usage.output_tokens == 3
    assert (whole.metadata, whole.user, whole.instructions) == ({"a": "b"}, "u", "Add.")
    events, last = streamed(client, **asked)
    kinds = [event.type for event in events]
    texts = [kind for kind in kinds if kind == "response.output_text.delta"]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", *texts, "response.output_text.done",
        "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type in texts) == "46"
    assert without_ids(last) == without_ids(whole)
    with client.responses.stream(**asked) as stream:
        assert without_ids(stream.get_final_response())["output"] == without_ids(whole)["output"]


def test_an_answer_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    asked: Any = dict(model="adder", input=SUM, temperature=0, max_output_tokens=1)
    whole = client.responses.create(**asked)
    events, last = streamed(client, **asked)
    assert events[-1].type == "response.incomplete"
    for response in (whole, last):
        assert response.status == response.output[-1].status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output_text == "4"
    assert events[-2].item.status == "incomplete"


def test_an_empty_answer_is_an_empty_message(client: openai.OpenAI) -> None:
    """So that the users' messages of a conversation do not follow each other."""
    stop: Any = {"stop": ["4"]}
    asked: Any = dict(model="adder", input=SUM, temperature=0, extra_body=stop)
    whole = client.responses.create(**asked)
    events, last = streamed(client, **asked)
    assert without_ids(last) == without_ids(whole) and whole.status == "completed"
    (message,) = whole.output
    assert message.type == "message" and whole.output_text == ""
    assert "response.output_text.delta" not in [event.type for event in events]
    assert events[-2].type == "response.output_item.done"
    more: Any = dict(model="adder", input="5+5=", temperature=0)
    kept = client.responses.create(**more, previous_response_id=whole.id)
    chat: Any = [
        {"role": "user", "content": SUM}, {"role": "assistant", "content": ""},
        {"role": "user", "content": "5+5="},
    ]  # fmt: skip
    same = client.chat.completions.create(model="adder", messages=chat, max_tokens=1)
    assert kept.usage and same.usage and kept.usage.input_tokens == same.usage.prompt_tokens


def test_calls_and_their_results(client: openai.OpenAI) -> None:
    whole = client.responses.create(**CALLS)
    (call,) = whole.output
    assert call.type == "function_call" and call.name == "f" and whole.status == "completed"
    events, last = streamed(client, **CALLS)
    assert without_ids(last) == without_ids(whole)
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    with client.responses.stream(**CALLS) as stream:
        (parsed,) = stream.get_final_response().output
    assert parsed.type == "function_call" and 0 <= parsed.parsed_arguments["a"] <= 99  # type: ignore[index, operator]
    named = {"type": "function", "name": "f"}
    others: Any = [{"type": "function", "name": "g"}, named]
    some: Any = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    (chosen,) = client.responses.create(**{**CALLS, "tools": others, "tool_choice": some}).output
    assert chosen.type == "function_call" and chosen.name == "f"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "46"}
    asked: Any = dict(model="adder", temperature=0, tools=[TOOL])
    kept = client.responses.create(**asked, input=[result], previous_response_id=whole.id)
    said = {"role": "user", "content": SUM}
    sent = client.responses.create(**asked, input=[said, call.to_dict(), result])
    assert kept.output_text == sent.output_text and kept.usage and sent.usage
    assert kept.usage.input_tokens == sent.usage.input_tokens > 100


def test_structured_text(client: openai.OpenAI) -> None:
    class Answer(pydantic.BaseModel):
        a: Literal["b", "c"]

    more: Any = dict(max_output_tokens=200, extra_body={"frequency_penalty": 2.0})
    asked: Any = dict(model="adder", input=SUM, temperature=0, **more)
    named: Any = {"type": "json_schema", "name": "x", "schema": {"enum": ["a", 22]}, "strict": True}
    found = client.responses.create(**asked, text={"format": named})
    assert found.output_text in ('"a"', "22")
    assert found.to_dict()["text"] == {"format": named}
    found = client.responses.create(**asked, text={"format": {"type": "json_object"}})
    assert found.output_text.startswith("{")
    parsed = client.responses.parse(**asked, text_format=Answer)
    assert parsed.output_parsed is not None and parsed.output_parsed.a in "bc"


def test_a_conversation_goes_on_without_its_instructions(client: openai.OpenAI) -> None:
    asked: Any = dict(model="adder", temperature=0)
    first = client.responses.create(**asked, input=SUM, instructions="Add all numbers.")
    second = client.responses.create(**asked, input="5+5=", previous_response_id=first.id)
    turns = [(SUM, "user"), (first.output_text, "assistant"), ("5+5=", "user")]
    chat: Any = [{"role": role, "content": text} for text, role in turns]
    same = client.chat.completions.create(**asked, messages=chat)
    assert second.output_text == same.choices[0].message.content
    assert second.usage and same.usage and second.previous_response_id == first.id
    assert second.usage.input_tokens == same.usage.prompt_tokens


def test_responses_belong_to_the_key_that_asked_for_them(
    client: openai.OpenAI, adder_server: Server
) -> None:
    other = client_of(adder_server, "k2")
    asked: Any = dict(model="adder", input=SUM, temperature=0)
    whole = client.responses.create(**asked)
    assert client.responses.retrieve(whole.id) == whole
    for act in (other.responses.retrieve, other.responses.delete):
        with pytest.raises(openai.NotFoundError, match=f"'{whole.id}' not found"):
            act(whole.id)
    with pytest.raises(openai.NotFoundError, match="Previous response with id") as error:
        other.responses.create(**asked, previous_response_id=whole.id)
    assert error.value.code == "previous_response_not_found"
    client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(whole.id)
    unkept = client.responses.create(**asked, store=False)
    assert unkept.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)
    kept = [client.responses.create(**asked).id for _ in range(5)]
    with pytest.raises(openai.NotFoundError):  # the server keeps four
        client.responses.retrieve(kept[0])
    for name in kept[1:]:
        client.responses.retrieve(name)


def test_a_client_that_leaves_ends_its_response(
    client: openai.OpenAI, adder_server: Server
) -> None:
    more: Any = dict(extra_body={"ignore_eos": True}, max_output_tokens=400)
    stream = client.responses.create(model="adder", input=SUM, **more, stream=True)
    first = next(stream)
    stream.close()
    wait_until("the response goes on", lambda: re.search(r"/responses \w+ 499", adder_server.text))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.response.id)


def test_a_refusal_and_where_prompts_are_cached() -> None:
    """Parts that OpenAI's client sends; a refusal is what the assistant said."""
    breakpoint_: dict[str, Any] = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    asked = {"role": "user", "content": [{"type": "input_text", "text": "a", **breakpoint_}]}
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert [one["content"] for one in messages_of([asked, said], "input")] == ["a", "no"]
    with pytest.raises(ValueError, match=r"content\[0\].type must be one of input_text"):
        messages_of([{**said, "role": "user"}], "input")
    noted = {"input": "a", "prompt_cache_key": "k", "prompt_cache_options": {"ttl": "30m"}}
    assert parse_response(noted, [], True).messages == [{"role": "user", "content": "a"}]


def test_only_names_of_fields_are_renamed() -> None:
    """`messages` and `tools` are also plain words."""
    for message, expected in [
        ("messages must be a list of messages, got 3", "input must be a list of messages, got 3"),
        ("messages[3].content is missing", "input.content is missing"),
        ("tools[1].function.name must be a text", "tools[1].name must be a text"),
        ("prompts times max_tokens are too many", "prompts times max_output_tokens are too many"),
    ]:
        assert renamed(message, NAMES) == expected


BAD: list[tuple[dict[str, Any], str]] = [
    (dict(input=None), "input is missing"),
    (dict(input=[]), "input must have a message or more"),
    (dict(input=5), "input must be a text or an array of items, got 5"),
    (dict(input=[{"type": "x"}]), "input[0].type must be one of message, reasoning"),
    (dict(input=[{"role": "tool", "content": ""}]), "input[0].role must be one of"),
    (dict(input=[{"role": "user"}]), "input[0].content must be an array, got null"),
    (dict(input=[{"type": "function_call"}]), "input[0].call_id must be a text, got null"),
    (
        dict(input=[{"role": "user", "content": [{"type": "input_image"}]}]),
        'input[0].content[0].type must be one of input_text, output_text, text, got "input_image"',
    ),
    (dict(input=[{"type": "item_reference", "id": "x"}]), 'got "item_reference"'),
    (
        dict(input=[{"type": "reasoning", "summary": [], "encrypted_content": "x"}]),
        "input[0].encrypted_content is not supported: send the text",
    ),
    (
        dict(input=[{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]),
        "arguments is not valid JSON",
    ),
    (dict(tools=[{"type": "web_search"}]), 'tools[0].type must be function, got "web_'),
    (dict(tools=[{"type": "function", "name": "a b"}]), "tools[0].name must be 1 to 128"),
    (dict(tools=[TOOL], tool_choice={"type": "mcp"}), "tool_choice.type must be one of"),
    (dict(tools=[TOOL], tool_choice={"type": "function", "name": "g"}), "there is no tool 'g'"),
    (dict(tool_choice="required"), "tool_choice is 'required', but there are no tools"),
    (dict(text={"format": {"type": "xml"}}), "text.format.type must be one of text, json_object"),
    (dict(text={"format": {"type": "json_schema", "name": "x"}}), "text.format.schema is missing"),
    (dict(text={"verbosity": "low"}), 'text.verbosity must be "medium" here, got "low"'),
    (dict(max_output_tokens=0), "max_output_tokens must be >= 1, got 0"),
    (dict(max_tokens=5), "max_tokens is not supported: use max_output_tokens"),
    (dict(temperature=-1), "temperature must be"),
    (dict(metadata={"a": 1}), "metadata.a must be a text, got 1"),
    (dict(metadata=[]), "metadata must be an object, got []"),
    (dict(metadata=False), "metadata must be an object, got false"),
    (dict(store="no"), 'store must be true or false, got "no"'),
    (dict(reasoning={"effort": "low"}), "reasoning.effort"),
    (dict(reasoning={"summary": "auto"}), "reasoning.summary is not supported"),
    (dict(truncation="auto"), 'truncation must be "disabled" here, got "auto"'),
    (dict(background=True), "background must be false here, got true"),
    (dict(conversation="c"), "conversation is not supported: use previous_response_id"),
    (dict(prompt={"id": "p"}), "prompt is not supported"),
    (dict(include=["x"]), "include must be [] here"),
    (dict(stream_options={}), "stream_options needs stream"),
    (dict(inptu="a"), "unknown field 'inptu'; did you mean 'input'?"),
    (dict(input="1" * 5000), "max_model_len"),
]


@pytest.fixture(scope="module")
def raw(adder_server: Server) -> Iterator[httpx.Client]:
    headers = {"Authorization": "Bearer k1"}
    with httpx.Client(base_url=adder_server.url, headers=headers, timeout=LIMIT) as client:
        yield client


@pytest.mark.parametrize(("body", "words"), BAD)
def test_bad_requests_are_named(raw: httpx.Client, body: Any, words: str) -> None:
    for stream in (False,) if "stream_options" in body else (False, True):
        found = raw.post("/v1/responses", json={"input": SUM, "stream": stream, **body})
        assert found.status_code == 400, found.text
        assert words in found.json()["error"]["message"]


def test_paths_of_stored_responses(raw: httpx.Client) -> None:
    url = "/v1/responses/resp_x"
    assert raw.get(url).status_code == raw.delete(url).status_code == 404
    found = raw.get(url, params={"stream": "true"})
    assert found.status_code == 400 and "unknown option 'stream'" in found.text
    found = raw.post(url)
    assert found.status_code == 405 and "takes DELETE, GET, HEAD" in found.text


def test_a_store_keeps_what_was_used_last() -> None:
    """Within its entries and its bytes, and nothing for other owners."""
    store = ResponseStore(3, 10 * OVERHEAD, 9 * OVERHEAD)
    for name in "abc":
        store.put(b"k", name, {}, [])
    assert store.get(b"k", "a") and store.get(b"j", "a") is None
    store.put(b"k", "d", {}, [])
    assert [name for name in "abcd" if store.get(b"k", name)] == ["a", "c", "d"]
    store.put(b"k", "e", {"x": "y" * 7 * OVERHEAD}, [])
    assert store.get(b"k", "e") and len(store) == 2, "bytes: one more would be too many"
    assert not store.put(b"k", "f", {"x": "y" * 8 * OVERHEAD}, []), "with the overhead too large"
    assert store.get(b"k", "f") is None and store.get(b"k", "e")
    assert store.delete(b"k", "e") and not store.delete(b"k", "e")
    assert store.delete(b"k", "d") and (len(store), store.num_bytes) == (0, 0)
    off = ResponseStore(0, 1 << 20, 1 << 20)
    assert not off.put(b"k", "a", {}, [])
    assert off.is_off and off.get(b"k", "a") is None


def steps_of(deltas: Sequence[Any]) -> list[tuple[str, int, str, str]]:
    reader = BlockReader()
    steps: list[Step] = [step for delta in deltas for step in reader.feed(delta)]
    steps += reader.close()
    return [(step.what, step.block.index, step.block.kind, step.piece) for step in steps]


def test_the_rest_of_a_call_comes_before_the_text_after_it() -> None:
    """In one delta, which has both."""
    begun = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}
    rest = {"function": {"arguments": ": 1}"}}
    found = steps_of(
        [
            {"reasoning_content": "r", "content": "t"},
            {"tool_calls": [{"index": 0, **begun}]},
            {"content": "u", "tool_calls": [{"index": 0, **rest}]},
        ]
    )
    assert found == [
        ("open", 0, "reasoning", ""), ("add", 0, "reasoning", "r"), ("close", 0, "reasoning", ""),
        ("open", 1, "text", ""), ("add", 1, "text", "t"), ("close", 1, "text", ""),
        ("open", 2, "call", ""), ("add", 2, "call", '{"a"'), ("add", 2, "call", ": 1}"),
        ("close", 2, "call", ""), ("open", 3, "text", ""), ("add", 3, "text", "u"),
        ("close", 3, "text", ""),
    ]  # fmt: skip


def test_items_of_one_answer_are_one_message() -> None:
    """Also those of two answers, one after another: each begins with its reasoning."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "r", "summary": [],
         "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": "c", "status": "completed"},
        call,
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "d"}]},
        {**call, "call_id": "d"},
        {"type": "function_call_output", "call_id": "c", "output": "e"},
        {"role": "assistant", "content": "f"},
        {"role": "assistant", "content": "g"},
    ]  # fmt: skip
    function = {"name": "f", "arguments": "{}"}
    assert messages_of(items, "input") == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "c", "reasoning_content": "b",
         "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "assistant", "content": None, "reasoning_content": "d",
         "tool_calls": [{"id": "d", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "e"},
        {"role": "assistant", "content": "f"},
        {"role": "assistant", "content": "g"},
    ]  # fmt: skip


def form_of() -> tuple[ResponseForm, ResponseStore]:
    body = {"messages": [{"role": "user", "content": "a"}]}
    asked, store = parse_body(CHAT, body, {}), ResponseStore(9, 1 << 20, 1 << 20)
    return ResponseForm(ResponseRequest({}, [], {}, True), asked, "m", store, None), store


def test_fields_without_effect_have_their_names_here() -> None:
    form, _ = form_of()
    form.asked = dataclasses.replace(form.asked, no_effect=("reasoning_effort",))
    listed = '"fields_without_effect":["reasoning.effort"]'
    assert form.begin(1).decode().count(listed) == 2
    assert listed in form.end([], Ending("stop", None, Usage(1, 0, 1, 0))).decode()


def test_a_response_that_fails_says_why() -> None:
    """After its first event: by an error, and by the engine's own reason."""
    form, store = form_of()
    block = Block("text", 0)
    form.begin(3)
    form.write(Step("open", block))
    block.pieces.append("ab")
    data = form.fail(APIError(503, "it has ended", "engine_dead")).decode()
    assert data.startswith("event: error\ndata: ") and "\nevent: response.failed\n" in data
    assert '"error":{"code":"server_error","message":"it has ended"}' in data
    assert '"store":false' in data
    assert '"status":"incomplete"' in data and '"text":"ab"' in data
    body: Any = form.body([block], Ending("error", "not finite", Usage(1, 0, 1, 0)))
    assert (body["status"], body["error"]["message"]) == ("failed", "not finite")
    assert len(store) == 0 and not body["store"]


def test_a_call_that_was_cut_is_no_part_of_the_conversation() -> None:
    """Its arguments are not valid JSON, so that no request could go on."""
    form, store = form_of()
    blocks = [Block("text", 0, pieces=["ab"]), Block("call", 1, "c", "f", ['{"a": "b'])]
    body: Any = form.body(blocks, Ending("length", None, Usage(1, 0, 5, 0)))
    found = store.get(None, body["id"])
    assert body["output"][1]["status"] == "incomplete" and found is not None
    assert orjson.loads(found.messages) == [{"role": "assistant", "content": "ab"}]


def test_a_long_stored_conversation_is_parsed_by_a_thread_within_limits() -> None:
    """A body of a few bytes continues it."""

    def parse(chat: Any, _: Any) -> APIRequest:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return parse_body(CHAT, chat, {})

    async def ask(number: int) -> Any:
        messages = [{"role": "user", "content": "a"}] * number
        responses._store.put(None, "resp_x", {}, messages)
        body = b'{"input": "b", "previous_response_id": "resp_x"}'
        request: Any = Sent(body)
        request.scope = {"line": SimpleNamespace(key=None)}
        return await responses._bodies.read(request, functools.partial(responses._parse, None, ""))

    on_loop: list[bool] = []
    readers, options = Readers(), ServerOptions(max_body_values=100_000)
    models = SimpleNamespace(names=("m",))
    chats: Any = SimpleNamespace(
        options=options, llm=SimpleNamespace(readers=readers), models=models, parse=parse
    )
    responses = Responses(chats)
    for number in (2, 3000):
        form = asyncio.run(ask(number))
        assert len(form.asked.prompts[0]) == number + 1
    assert on_loop == [True, False]
    with pytest.raises(APIError, match="stored conversation must have at most 100000 values") as it:
        asyncio.run(ask(6000))
    assert it.value.status == 413
    readers.close()


class Sent:
    """A request with this body, of a client that stays."""

    def __init__(self, data: bytes) -> None:
        self._data, self.headers = data, dict[str, str]()

    async def stream(self) -> Any:
        yield self._data

    async def receive(self) -> Any:
        await asyncio.Event().wait()
