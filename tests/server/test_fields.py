"""Fields of requests that clients of other servers send, against a server of the random model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from reference import make_llm
from servers import Server, serving
from waiting import LIMIT

from nanovllm import BeamSearchParams
from nanovllm.openai.request import parse_body
from nanovllm.server.errors import APIError
from nanovllm.server.options import ServerOptions
from nanovllm.server.refusals import check_beams

HI = [{"role": "user", "content": "Hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TEMPLATE = (
    "{# reasoning_effort #}{{ bos_token }}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% for d in documents or [] %}[{{ d.text }}]{% endfor %}{{ tools or '' }}<tool_call>"
    "{% if add_generation_prompt %}assistant:{% endif %}{% if thinking %}<think>{% endif %}"
    "{% if false %}</think>{% endif %}"
)


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("served")
    for file in model_dir.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    (path / "chat_template.jinja").write_text(TEMPLATE)
    with serving(path / "log", str(path), "--served-model-name", "tiny", "t") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=LIMIT) as client:
        yield client


def post(client: httpx.Client, url: str = TEXT, **body: Any) -> Any:
    """The answer to a request that is good."""
    more: dict[str, Any] = dict(messages=HI) if url == CHAT else dict(prompt="abc")
    response = client.post(url, json={**more, "max_tokens": 4, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def chunks(client: httpx.Client, url: str = TEXT, **body: Any) -> list[Any]:
    import json

    more: dict[str, Any] = dict(messages=HI) if url == CHAT else dict(prompt="abc")
    body = {**more, "max_tokens": 4, "temperature": 0, "stream": True, **body}
    response = client.post(url, json=body)
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def refused(client: httpx.Client, url: str = TEXT, **body: Any) -> dict[str, Any]:
    """The error of a request that is refused."""
    more: dict[str, Any] = dict(messages=HI) if url == CHAT else dict(prompt="abc")
    response = client.post(url, json={**more, **body})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_all_names_are_listed_and_the_first_one_answers(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [one["id"] for one in listed] == ["tiny", "t"]
    assert {post(client, model=name)["model"] for name in ("tiny", "t")} == {"tiny"}
    assert {chunk["model"] for chunk in chunks(client, CHAT, model="t")} == {"tiny"}
    assert (
        client.post("/v1/embeddings", json={"input": "a", "model": "t"}).json()["model"] == "tiny"
    )


@pytest.mark.parametrize("url", [CHAT, TEXT])
def test_each_chunk_may_have_the_usage(client: httpx.Client, url: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *found, last = chunks(client, url, n=2, ignore_eos=True, stream_options=options)
    for index in (0, 1):
        own = [one["usage"] for one in found if one["choices"][0]["index"] == index]
        counts = [one["completion_tokens"] for one in own]
        assert counts == sorted(counts) and counts[-1] == 4
        assert {one["prompt_tokens"] for one in own} == {last["usage"]["prompt_tokens"]}
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8


def test_a_prompt_that_is_too_long_has_a_code(client: httpx.Client) -> None:
    """By which litellm and langchain know it, or by the words of the message."""
    text = "a" * 5000
    errors = [
        refused(client, prompt=text),
        refused(client, prompt=["a", text]),
        refused(client, prompt="a", min_tokens=4000, max_tokens=4000),
        refused(client, CHAT, messages=[{"role": "user", "content": text}]),
        client.post("/v1/embeddings", json={"input": ["a", text]}).json()["error"],
        client.post("/rerank", json={"query": "a", "documents": [text]}).json()["error"],
    ]
    for error in errors:
        assert error["code"] == "context_length_exceeded"
        assert "this model's maximum context length is" in error["message"]
    assert refused(client, prompt=[[]])["code"] is None


def test_a_ranking_may_leave_out_the_documents(client: httpx.Client) -> None:
    asked: dict[str, Any] = {"query": "a", "documents": ["b", "c"]}
    for shows in (True, False):
        answer = client.post("/rerank", json={**asked, "return_documents": shows}).json()
        assert ["document" in one for one in answer["results"]] == [shows] * 2


def test_the_prompt_alone(client: httpx.Client) -> None:
    whole = post(client, echo=True, logprobs=1, max_tokens=1)["choices"][0]
    alone = post(client, echo=True, logprobs=1, max_tokens=0)
    (choice,) = alone["choices"]
    assert (choice["text"], choice["token_ids"]) == ("abc", [])
    assert choice["finish_reason"] == "length" and alone["usage"]["completion_tokens"] == 0
    for name, values in choice["logprobs"].items():
        assert values == whole["logprobs"][name][:3]
    streamed = chunks(client, echo=True, max_tokens=0)
    assert "".join(one["choices"][0]["text"] for one in streamed) == "abc"
    assert streamed[-1]["choices"][0]["finish_reason"] == "length"
    for body in (dict(max_tokens=0), dict(max_tokens=0, echo=False)):
        assert "max_tokens must be >= 1" in refused(client, **body)["message"]
    assert "max_tokens must be >= 1" in refused(client, CHAT, max_tokens=0)["message"]


def test_the_best_of_several_samples(client: httpx.Client) -> None:
    asked: dict[str, Any] = dict(temperature=1, seed=3, max_tokens=9)
    asked["stop_token_ids"] = [*range(0, 258, 5)]  # samples of several lengths
    every = post(client, n=5, logprobs=0, **asked)["choices"]
    means = {
        tuple(one["token_ids"]): sum(one["logprobs"]["token_logprobs"]) / len(one["token_ids"])
        for one in every
    }
    found = post(client, n=2, best_of=5, **asked)
    order = sorted(means, key=lambda ids: -means[ids])
    assert [tuple(one["token_ids"]) for one in found["choices"]] == order[:2]
    assert [one["index"] for one in found["choices"]] == [0, 1]
    assert found["choices"][0]["logprobs"] is None
    assert found["usage"]["completion_tokens"] == sum(map(len, means)), "all were generated"
    likely = post(client, best_of=5, logprobs=1, **asked)["choices"]
    assert len(likely) == 1 and len(likely[0]["logprobs"]["top_logprobs"][0]) <= 2
    assert len(post(client, n=2, best_of=2, **asked)["choices"]) == 2
    for more in (dict(n=2), dict(echo=True)):
        parsed = parse_body(TEXT, {"prompt": "a", "best_of": 2, **more}, {})
        form = parsed.form
        assert (parsed.params.logprobs is not None) == form.hides_logprobs == ("n" not in more)
        assert parsed.params.prompt_logprobs is None
    assert "streamed" in refused(client, best_of=2, stream=True)["message"]
    assert "n (with best_of)" in refused(client, best_of=2, n=3)["message"]
    assert "n (with best_of)" in refused(client, best_of=1, n=2)["message"]
    assert "it is for /v1/completions" in refused(client, CHAT, best_of=2)["message"]


@pytest.mark.parametrize("url", [CHAT, TEXT])
def test_token_ids_are_returned(client: httpx.Client, url: str) -> None:
    whole = post(client, url, return_token_ids=True, n=2)
    parts = chunks(client, url, return_token_ids=True, n=2)
    for index, choice in enumerate(whole["choices"]):
        own = [one for one in parts if one["choices"][0]["index"] == index]
        ids = [i for one in own for i in one["choices"][0]["token_ids"]]
        assert ids == choice["token_ids"]
        places = (whole, own[0]) if url == CHAT else (choice, own[0]["choices"][0])
        prompt = [one["prompt_token_ids"] for one in places]
        assert prompt[0] == prompt[1] and len(prompt[0]) == whole["usage"]["prompt_tokens"]
        assert not any("prompt_token_ids" in str(one) for one in own[1:])
    assert "token_ids" not in post(client, url, return_token_ids=False)["choices"][0]


def test_ids_stand_for_tokens(client: httpx.Client) -> None:
    asked: dict[str, Any] = dict(return_tokens_as_token_ids=True)
    (choice,) = post(client, logprobs=2, echo=True, **asked)["choices"]
    ids = [97, 98, 99, *choice["token_ids"]]
    assert len(choice["logprobs"]["tokens"]) == 7
    assert choice["logprobs"]["tokens"][-4:] == [f"token_id:{i}" for i in ids[-4:]]
    (choice,) = post(client, CHAT, logprobs=True, top_logprobs=1, **asked)["choices"]
    tokens = [one["token"] for one in choice["logprobs"]["content"]]
    assert tokens == [f"token_id:{i}" for i in choice["token_ids"]]


def prompt_of(client: httpx.Client, **body: Any) -> str:
    """The text of a chat's prompt."""
    response = client.post("/tokenize", json={"messages": HI, **body})
    assert response.status_code == 200, response.text
    tokens = response.json()["tokens"]
    return str(client.post("/detokenize", json={"tokens": tokens}).json()["prompt"])


def test_fields_of_the_chat_template(client: httpx.Client) -> None:
    begin = "user:Hi;<tool_call>"
    assert prompt_of(client).endswith(f"{begin}assistant:")
    assert prompt_of(client, add_generation_prompt=False).endswith(begin)
    assert "[x]" in prompt_of(client, documents=[{"title": "a", "text": "x"}])
    for documents in ("x", ["x"], {"text": "x"}):
        message = refused(client, CHAT, documents=documents)["message"]
        assert message.startswith("documents must be an array of objects")
    for kind, end in (("enabled", "<think>"), ("disabled", "assistant:")):
        assert prompt_of(client, thinking={"type": kind}).endswith(end)
    talk = [*HI, {"role": "assistant", "content": "Well"}]
    assert prompt_of(client, messages=talk, continue_final_message=True).endswith("assistant:Well")
    both = dict(continue_final_message=True, add_generation_prompt=True)
    assert "add_generation_prompt to be false" in refused(client, CHAT, **both)["message"]
    message = refused(client, CHAT, reasoning_effort="low")["message"]
    assert message == "reasoning_effort: the chat template does not mention it", "in a comment only"
    assert "thinking must be an object" in refused(client, CHAT, thinking="low")["message"]
    assert "thinking.type must" in refused(client, CHAT, thinking={"type": "x"})["message"]
    assert "trust-request" in refused(client, CHAT, chat_template="a")["message"]


def test_reasoning_may_be_left_out(client: httpx.Client) -> None:
    asked: dict[str, Any] = dict(thinking={"type": "enabled"}, max_tokens=20)
    shown = post(client, CHAT, **asked)["choices"][0]["message"]
    assert shown.keys() == {"role", "content", "reasoning_content"}
    hidden = post(client, CHAT, include_reasoning=False, **asked)["choices"][0]["message"]
    assert hidden.keys() == {"role", "content"}
    parts = chunks(client, CHAT, include_reasoning=False, **asked)
    assert not any("reasoning_content" in one["choices"][0]["delta"] for one in parts)


def test_a_client_names_its_request(client: httpx.Client, server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    header = {"X-Request-Id": "of-header"}
    response = client.post(TEXT, json=body, headers=header)
    assert response.headers["x-request-id"] == "of-header"
    assert response.json()["id"] == "cmpl-of-header"
    response = client.post(TEXT, json={**body, "request_id": "of-body"})
    assert response.headers["x-request-id"] == "of-body"
    response = client.post(TEXT, json={**body, "request_id": "both"}, headers=header)
    assert response.headers["x-request-id"] == "of-header"
    assert response.json()["id"] == "cmpl-both"
    assert server.line_with(" of-body ")
    assert "request_id must" in refused(client, request_id="a b")["message"]
    response = client.post(TEXT, json=body, headers={"X-Request-Id": "a b"})
    assert response.status_code == 400 and "X-Request-Id must" in response.text
    for url, more in (("/v1/embeddings", {"input": "a"}), ("/tokenize", {"messages": HI})):
        response = client.post(url, json={**more, "request_id": "of-other"})
        assert response.headers["x-request-id"] == "of-other"


def test_older_fields_of_constraints(client: httpx.Client) -> None:
    asked: dict[str, Any] = dict(max_tokens=200, seed=1, temperature=1)
    text = post(client, guided_choice=["yes", "no"], **asked)["choices"][0]["text"]
    assert text in ("yes", "no")
    text = post(client, guided_regex="a{3}", **asked)["choices"][0]["text"]
    assert text == "aaa"
    text = post(client, guided_grammar='start: "bc"', **asked)["choices"][0]["text"]
    assert text == "bc"
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    chat = post(client, CHAT, guided_json=schema, guided_whitespace_pattern=" ", **asked)
    assert chat["choices"][0]["message"]["content"].strip(" ") in ("{}", "{ }")
    assert "guided_regex" in refused(client, guided_regex=5)["message"]
    both = dict(guided_regex="a", structured_outputs={"regex": "a"})
    assert "one of guided_regex and" in refused(client, **both)["message"]
    long = refused(client, guided_regex="a" * 300_000)["message"]
    assert "guided_regex must have at most 256 KiB" in long


def test_special_tokens_may_be_left_out(client: httpx.Client) -> None:
    """The random model's tokenizer adds none: see the tests of prompts without them."""
    counts = [
        post(client, url, add_special_tokens=adds)["usage"]["prompt_tokens"]
        for url in (CHAT, TEXT)
        for adds in (True, False)
    ]
    assert counts[0] == counts[1] and counts[2] == counts[3] == 3
    assert "must be true or false" in refused(client, add_special_tokens=1)["message"]


def test_a_choice_among_some_tools(client: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("left", "right")]
    for mode in ("required", "auto"):
        some = {"mode": mode, "tools": [{"type": "function", "function": {"name": "right"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": some}
        asked: dict[str, Any] = dict(tools=tools, max_tokens=100, seed=2, temperature=1)
        message = post(client, CHAT, tool_choice=choice, **asked)["choices"][0]["message"]
        names = {call["function"]["name"] for call in message.get("tool_calls", ())}
        assert names == {"right"} if mode == "required" else names <= {"right"}
    shown = prompt_of(client, tools=tools, tool_choice=choice)
    assert "left" in shown and "right" in shown
    some = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "up"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": some}
    error = refused(client, CHAT, tools=tools, tool_choice=choice)
    assert "there is no tool 'up'" in error["message"]


def test_beams(client: httpx.Client, model_dir: Path) -> None:
    """The same as in Python, among other requests of the server."""
    with make_llm(model_dir) as llm:
        params = BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.5)
        (expected,) = llm.beam_search(["abc"], params)
    asked: dict[str, Any] = dict(use_beam_search=True, n=3, max_tokens=5)
    found = post(client, length_penalty=0.5, **asked)
    ids = [choice["token_ids"] for choice in found["choices"]]
    assert ids == [one.token_ids for one in expected.sequences]
    assert ["abc" + one["text"] for one in found["choices"]] == [
        one.text for one in expected.sequences
    ]
    assert [one["index"] for one in found["choices"]] == [0, 1, 2]
    assert found["usage"]["completion_tokens"] == sum(map(len, ids))
    assert len(post(client, CHAT, **asked)["choices"]) == 3
    for field in (dict(top_k=5), dict(temperature=1), dict(stop="a"), dict(logprobs=1)):
        (name,) = field
        assert name in refused(client, **asked, **field)["message"]
    assert "streamed" in refused(client, **asked, stream=True)["message"]
    wide = refused(client, use_beam_search=True, n=11)["message"]
    assert wide == (
        "n must be at most 10 with use_beam_search, which is 20 (max_logprobs) by 2 tokens for each"
        " beam, got 11"
    )
    likely = post(client, use_beam_search=True, n=2, ignore_eos=True, max_tokens=None)
    assert [len(choice["token_ids"]) for choice in likely["choices"]] == [16, 16]
    post(client, CHAT, **asked, logprobs=False, top_p=1)
    assert "needs use_beam_search" in refused(client, length_penalty=2)["message"]
    post(client, use_beam_search=False, length_penalty=1.0, spaces_between_special_tokens=True)


def test_beams_need_more_candidates_if_many_tokens_end_a_text() -> None:
    limits = ServerOptions(max_logprobs=20)
    check_beams(BeamSearchParams(beam_width=5), limits, {1, 2, 3})
    check_beams(BeamSearchParams(beam_width=10, ignore_eos=True), limits, {1, 2, 3})
    with pytest.raises(APIError, match=r"n must be at most 5 .* by 4 tokens .* got 6"):
        check_beams(BeamSearchParams(beam_width=6), limits, {1, 2, 3})


@pytest.mark.parametrize("more", [{}, {"guided_choice": ["yes", "no"]}, {"stream": True}], ids=str)
def test_reasoning_has_at_most_its_budget(client: httpx.Client, more: Any) -> None:
    """After these tokens the end of the reasoning is forced, then the answer goes on."""
    plain = post(client, CHAT, thinking={"type": "enabled"}, max_tokens=40)["choices"][0]
    for budget in (0, 5):
        asked: dict[str, Any] = dict(max_tokens=40, **more)
        if budget:
            asked |= dict(thinking={"type": "enabled"}, thinking_token_budget=budget)
        else:
            asked |= dict(thinking={"type": "enabled", "budget_tokens": 0})
        if more.get("stream"):
            parts = [
                one["choices"][0] for one in chunks(client, CHAT, return_token_ids=True, **asked)
            ]
            ids = [token_id for one in parts for token_id in one["token_ids"]]
            text = "".join(one["delta"].get("content") or "" for one in parts)
        else:
            (choice,) = post(client, CHAT, **asked)["choices"]
            ids, text = choice["token_ids"], choice["message"]["content"]
        assert ids[:budget] == plain["token_ids"][:budget]
        tokens = client.post("/detokenize", json={"tokens": ids[budget : budget + 8]})
        assert tokens.json()["prompt"] == "</think>"
        assert text and (text in ("yes", "no")) == ("guided_choice" in more)
    error = refused(client, CHAT, thinking_token_budget=5)
    assert "does not show whether an answer begins with reasoning" in error["message"]
    both = dict(thinking={"type": "enabled", "budget_tokens": 1}, thinking_token_budget=5)
    assert "give one of" in refused(client, CHAT, **both)["message"]
    assert "it is for chats" in refused(client, thinking_token_budget=5)["message"]
    bound = {"regex": "a", "after": "</think>", "after_tokens": 5}
    both = dict(thinking={"type": "enabled"}, structured_outputs=bound, thinking_token_budget=100)
    assert refused(client, CHAT, **both)["message"] == (
        "give one of thinking_token_budget and structured_outputs.after_tokens"
    )
