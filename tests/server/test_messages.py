"""/v1/messages, by Anthropic's client, and what it is made of."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import orjson
import pytest
from servers import Server
from waiting import LIMIT

from nanovllm.openai.request import CHAT, parse_body
from nanovllm.server.answered import json_response
from nanovllm.server.chats.blocks import Block
from nanovllm.server.chats.form import Ending, Usage
from nanovllm.server.errors import APIError
from nanovllm.server.messages.endpoints import Messages
from nanovllm.server.messages.events import MessageForm
from nanovllm.server.messages.request import chat_of
from nanovllm.server.messages.thinking import chat_thinking
from nanovllm.server.messages.turns import messages_of
from nanovllm.server.options import ServerOptions

SUM: Any = [{"role": "user", "content": "12+34="}]
SCHEMA = {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"], "additionalProperties": False,
}  # fmt: skip
TOOL: Any = {"name": "f", "description": "adds", "input_schema": SCHEMA}
GREEDY: Any = {"temperature": 0}
ASKED: Any = dict(model="adder", messages=SUM, max_tokens=100, extra_body=GREEDY)
CALLS: Any = dict(
    ASKED, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True}
)


@pytest.fixture(scope="module")
def client(adder_server: Server) -> anthropic.Anthropic:
    """Its key is in `x-api-key`."""
    url = adder_server.url
    return anthropic.Anthropic(base_url=url, api_key="k1", timeout=LIMIT, max_retries=0)


@pytest.fixture(scope="module")
def raw(adder_server: Server) -> Iterator[httpx.Client]:
    headers = {"x-api-key": "k2"}
    with httpx.Client(base_url=adder_server.url, headers=headers, timeout=LIMIT) as client:
        yield client


def streamed(client: anthropic.Anthropic, **asked: Any) -> tuple[list[str], Any]:
    """The types of a message's events, and the message that the client makes of them."""
    with client.messages.stream(**asked) as stream:
        kinds: list[str] = [event.type for event in stream]
        return kinds, stream.get_final_message()


def shown(message: Any) -> Any:
    """A message without what differs between equal ones."""
    body = message.to_dict()
    usage = body.pop("usage")
    body.pop("stop_details", None)
    for block in body["content"]:
        for name in ("id", "parsed_output"):
            block.pop(name, None)
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return {**body, "id": None, "usage": (num_prompt, usage["output_tokens"])}


def test_text_whole_and_streamed(client: anthropic.Anthropic) -> None:
    asked: Any = {**ASKED, "system": "Add.", "metadata": {"user_id": "u"}}
    whole = client.messages.create(**asked)
    (block,) = whole.content
    assert block.type == "text" and block.text == "46" and whole.stop_reason == "end_turn"
    kinds, last = streamed(client, **asked)
    deltas = [kind for kind in kinds if kind in ("content_block_delta", "text")]
    assert kinds == [
        "message_start", "content_block_start", *deltas, "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert shown(last) == shown(whole)
    blocks: Any = [{"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}]
    assert shown(client.messages.create(**{**asked, "system": blocks})) == shown(whole)


def test_events_have_their_names(raw: httpx.Client) -> None:
    """And a ping comes after the first one."""
    body = dict(messages=SUM, max_tokens=2, stream=True)
    found = raw.post("/v1/messages", json=body)
    assert found.headers["content-type"].startswith("text/event-stream")
    first, second, *_, last, rest = found.text.split("\n\n")
    assert first.startswith('event: message_start\ndata: {"type":"message_start","message":{"id"')
    assert second == 'event: ping\ndata: {"type":"ping"}'
    assert (last, rest) == ('event: message_stop\ndata: {"type":"message_stop"}', "")


def test_calls_and_their_results(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**CALLS)
    (call,) = whole.content
    assert whole.stop_reason == "tool_use" and call.type == "tool_use" and call.name == "f"
    value = call.input["a"]
    assert isinstance(value, int) and 0 <= value <= 99
    _, last = streamed(client, **CALLS)
    assert shown(last) == shown(whole)
    chosen: Any = {**CALLS, "tool_choice": {"type": "tool", "name": "f"}}
    assert shown(client.messages.create(**chosen)) == shown(whole)
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "46"}
    turns = [*SUM, {"role": "assistant", "content": whole.content}]
    answers = []
    for more in ({}, {"is_error": True}, {"content": [{"type": "text", "text": "46"}]}):
        asked = {**ASKED, "messages": [*turns, {"role": "user", "content": [{**result, **more}]}]}
        answers.append(client.messages.create(**asked))
    assert shown(answers[0]) == shown(answers[2])
    numbers = [shown(answer)["usage"][0] for answer in answers]
    assert numbers[0] < numbers[1] == numbers[0] + len("Error: ")


def test_why_an_answer_has_ended(client: anthropic.Anthropic) -> None:
    def ended(**more: Any) -> Any:
        whole = client.messages.create(**{**ASKED, **more})
        assert shown(streamed(client, **{**ASKED, **more})[1]) == shown(whole)
        texts = [block.text for block in whole.content if block.type == "text"]
        return whole.stop_reason, whole.stop_sequence, "".join(texts)

    assert ended() == ("end_turn", None, "46")
    assert ended(max_tokens=1) == ("max_tokens", None, "4")
    assert ended(stop_sequences=["x", "6"]) == ("stop_sequence", "6", "4")
    free: Any = {**GREEDY, "ignore_eos": True}
    full: Any = dict(messages=[{"role": "user", "content": "1" * 470}], extra_body=free)
    assert ended(max_tokens=100, **full)[0] == "model_context_window_exceeded"


def test_structured_text_and_the_start_of_an_answer(client: anthropic.Anthropic) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": {"enum": ["a", 22]}}}
    (block,) = client.messages.create(**ASKED, output_config=form).content
    assert block.type == "text" and block.text in ('"a"', "22")
    begun = [*SUM, {"role": "assistant", "content": "4"}]
    (block,) = client.messages.create(**{**ASKED, "messages": begun}).content
    assert block.type == "text" and block.text == "6"


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    """Also of what is too long for the model."""
    for more in ({}, {"system": "Add."}, {"tools": [TOOL]}):
        counted = client.messages.count_tokens(model="adder", messages=SUM, **more)  # type: ignore[arg-type]
        assert counted.input_tokens == shown(client.messages.create(**ASKED, **more))["usage"][0]
    long: Any = [{"role": "user", "content": "1" * 5000}]
    assert client.messages.count_tokens(model="adder", messages=long).input_tokens > 5000
    with pytest.raises(anthropic.BadRequestError, match="unknown field 'max_tokens'"):
        client.messages.count_tokens(model="adder", messages=SUM, extra_body={"max_tokens": 5})


def test_keys(adder_server: Server, raw: httpx.Client) -> None:
    """By either header; errors have this API's form where their path is its own."""
    body, url = dict(messages=SUM, max_tokens=1), "/v1/messages"
    assert raw.post(url, json=body).status_code == 200
    assert raw.get("/v1/models").status_code == 200
    bearer = {"Authorization": "Bearer k1", "x-api-key": "bad"}
    assert raw.post(url, json=body, headers=bearer).status_code == 200
    bad = {"x-api-key": "bad"}
    found = raw.post(url, json=body, headers=bad)
    assert found.status_code == 401 and found.json() == {
        "type": "error",
        "error": {
            "type": "authentication_error",
            "message": "this key is wrong: Authorization: Bearer KEY, or x-api-key: KEY",
        },
    }
    assert raw.get("/v1/models", headers=bad).json()["error"]["code"] == "invalid_api_key"
    for path, status, kind in (
        (f"{url}/batches", 404, "not_found_error"),
        (f"{url}x", 404, None),
        (url, 405, "invalid_request_error"),
    ):
        error = raw.get(path)
        assert error.status_code == status
        assert error.json().get("type") == (kind and "error")
        assert kind is None or error.json()["error"]["type"] == kind
    assert "k2" not in adder_server.text


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


BAD: list[tuple[dict[str, Any], str]] = [
    (dict(max_tokens=None), "max_tokens is missing"),
    (dict(max_tokens=0), "max_tokens must be >= 1, got 0"),
    (dict(messages=None), "messages is missing"),
    (dict(messages=[]), "messages must have a message or more"),
    (dict(messages="a"), 'messages must be an array, got "a"'),
    (dict(messages=[{"role": "system", "content": "a"}]), "messages[0].role must be one of"),
    (
        dict(messages=[{"role": "user", "content": 5}]),
        "messages[0].content must be an array, got 5",
    ),
    (
        said({"type": "image", "source": {}}),
        'messages[0].content[0].type must be one of text, tool_result, got "image"',
    ),
    (said({"type": "text"}), "messages[0].content[0].text is missing"),
    (said({"type": "text", "text": "a", "x": 1}), "messages[0].content[0]: unknown field 'x'"),
    (said({"type": "tool_result"}), "messages[0].content[0].tool_use_id must be a text, got null"),
    (
        said({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}),
        'messages[0].content[0].content[0].type must be text, got "image"',
    ),
    (
        said({"type": "tool_use", "id": "a", "name": "f", "input": "x"}, role="assistant"),
        'messages[0].content[0].input must be an object, got "x"',
    ),
    (
        said({"type": "tool_use", "id": "a", "name": "f", "input": {}}, role="assistant"),
        "messages: the last one must be the user's",
    ),
    (dict(system=[{"type": "image"}]), 'system[0].type must be text, got "image"'),
    (dict(tools=[{"type": "web_search_20250305", "name": "w"}]), "tools[0].type must be custom"),
    (dict(tools=[{"name": "f"}]), "tools[0].input_schema is missing"),
    (dict(tools=[{"name": "f", "input_schema": 5}]), "tools[0].input_schema must be a JSON"),
    (dict(tools=[{"name": "a b", "input_schema": {}}]), "tools[0].name must be 1 to 128"),
    (dict(tools=[TOOL], tool_choice={"type": "tool", "name": "g"}), "there is no tool 'g'"),
    (dict(tools=[TOOL], tool_choice="any"), 'tool_choice must be an object, got "any"'),
    (dict(stop_sequences="a"), 'stop_sequences must be an array, got "a"'),
    (dict(stop_sequences=["a"] * 65), "stop_sequences must have at most 64 texts"),
    (dict(temperature=-1), "temperature must be"),
    (dict(thinking={"type": "adaptive"}), "thinking.type must not be 'adaptive' here"),
    (dict(thinking={"type": "adaptive", "budget_tokens": 1}), "unknown field 'budget_tokens'"),
    (dict(output_config={"effort": "low"}), "output_config.effort"),
    (
        dict(output_config={"format": {"type": "x"}}),
        "output_config.format.type must be json_schema",
    ),
    (dict(mcp_servers=[]), "mcp_servers is not supported: this server calls no tools"),
    (dict(metadata={"a": "b"}), "metadata: unknown field 'a'"),
    (dict(stream="yes"), 'stream must be true or false, got "yes"'),
    (dict(stop=["a"]), "stop is not supported: use stop_sequences"),
    (dict(messages=[{"role": "user", "content": "1" * 5000}]), "max_model_len"),
]


@pytest.mark.parametrize(("body", "words"), BAD)
def test_bad_requests_are_named(raw: httpx.Client, body: Any, words: str) -> None:
    for stream in (False, True):
        asked = {"messages": SUM, "max_tokens": 5, "stream": stream, **body}
        found = raw.post("/v1/messages", json=asked)
        assert found.status_code == 400, found.text
        error = found.json()
        assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
        assert words in error["error"]["message"]


def test_turns_become_messages() -> None:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
    thinks = {"type": "thinking", "thinking": "t", "signature": ""}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [thinks, {"type": "text", "text": "b"}, call]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c"},
                {"type": "text", "text": "d"},
                {"type": "text", "text": "e"},
            ],
        },
    ]
    function = {"name": "f", "arguments": {"a": 1}}
    assert messages_of(turns, "s") == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "t",
         "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": "d\ne"},
    ]  # fmt: skip


def test_thinking_is_what_the_template_can_do() -> None:
    on, off, switch = {"type": "adaptive"}, {"type": "disabled"}, "</think>{{ enable_thinking }}"
    bounded = {"type": "enabled", "budget_tokens": 5}
    assert chat_thinking(None, switch) == {}
    assert chat_thinking(on, switch) == {"thinking": {"type": "enabled"}}
    assert chat_thinking(off, switch) == {"thinking": off}
    budget = {"thinking_token_budget": 5}
    assert chat_thinking(bounded, switch) == {"thinking": {"type": "enabled"}, **budget}
    assert chat_thinking(bounded, "</think>") == budget
    assert chat_thinking(on, "</think>") == chat_thinking(off, "") == {}
    for thinking, template in ((off, "</think>"), (on, ""), (bounded, "")):
        with pytest.raises(ValueError, match=r"thinking\.type must not be"):
            chat_thinking(thinking, template)


def test_thinking_is_what_the_used_template_can_do() -> None:
    """A tokenizer may have several templates, of which only one writes the prompt."""
    tokenizer = SimpleNamespace(chat_template={"default": "</think>", "tool_use": ""})
    llm = SimpleNamespace(tokenizer=tokenizer, readers=None)
    chats: Any = SimpleNamespace(llm=llm, options=ServerOptions(), parse=lambda chat, _: chat)
    asked: dict[str, Any] = {"messages": SUM, "max_tokens": 5, "thinking": {"type": "disabled"}}
    with pytest.raises(ValueError, match="the model always reasons"):
        Messages(chats)._asked(chat_of(asked), asked)
    asked["tools"] = [{"name": "f", "input_schema": {}}]
    Messages(chats)._asked(chat_of(asked), asked)


def test_a_stream_that_fails_ends_with_the_error() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}
    form = MessageForm(parse_body(CHAT, body, {}), "m")
    assert form.fail(APIError(503, "it has ended", "engine_dead")) == (
        b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error",'
        b'"message":"it has ended"}}\n\n'
    )
    for reason, stop in (("error", "not finite"), ("abort", None)):
        failed, text = Ending(reason, stop, Usage(5, 0, 3, 0)), Block("text", 0, pieces=["ab"])
        why = stop or "the request was aborted"
        data = form.end([text], failed).decode()
        assert data.startswith("event: error\n") and why in data and "stop_reason" not in data
        with pytest.raises(APIError, match=why):
            form.body([text], failed)
    cut = Block("call", 0, "c", "f", ['{"a": 1}'])
    whole: Any = form.body([cut], Ending("tool_calls", None, Usage(5, 2, 3, 0)))
    assert b'"input":{"a": 1}' in orjson.dumps(whole) and whole["usage"]["input_tokens"] == 3


def test_arguments_of_a_call_are_as_the_model_wrote_them() -> None:
    """An integer of more than 64 bits, and half a character, made a bad request of the answer."""
    form = MessageForm(parse_body(CHAT, {"messages": [{"role": "user", "content": "a"}]}, {}), "m")
    ending = Ending("tool_calls", None, Usage(1, 0, 5, 0))
    for text in ('{"a": 123456789012345678901234567890}', '{"a":"\\ud800"}', '{"a": "é"}'):
        body = bytes(json_response(form.body([Block("call", 0, "c", "f", [text])], ending)).body)
        assert b'"input":' + text.encode() in body
    for text in ('{"a": NaN}', '{"a": ', '{"a": "\ud800"}'):
        with pytest.raises(APIError, match="call of f are not valid JSON") as error:
            form.body([Block("call", 0, "c", "f", [text])], ending)
        assert error.value.status == 500
