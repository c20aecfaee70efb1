"""What errors about bodies say: the field as `param`, and the words of JSON. No server runs."""

import json
from typing import Any

import pytest

from nanovllm.engine.requests.prompt_length import PromptTooLongError
from nanovllm.openai.fields import CHAT, COMPLETIONS
from nanovllm.openai.request import parse_body
from nanovllm.openai.vectors import EMBEDDINGS, parse_embeddings
from nanovllm.server.described.endpoints import fields_of
from nanovllm.server.errors import APIError, as_api_error, error_param, error_response
from nanovllm.server.json_words import in_json_words
from nanovllm.server.messages.request import chat_of
from nanovllm.server.responses.body import error_event
from nanovllm.server.responses.endpoints import RESPONSES
from nanovllm.server.responses.request import REFUSED, parse_response

HI = [{"role": "user", "content": "Hi"}]


def param_of(error: APIError | str, url: str) -> str | None:
    return error_param(APIError(400, error) if isinstance(error, str) else error, fields_of(url))


def refused(parse: Any, *given: Any) -> APIError:
    with pytest.raises((TypeError, ValueError)) as caught:
        parse(*given)
    return as_api_error(caught.value)


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        (CHAT, dict(messages=HI, top_p=3), "top_p"),
        (CHAT, dict(messages=HI, top_q=3), "top_q"),
        (CHAT, dict(), "messages"),
        (CHAT, dict(messages="a"), "messages"),
        (CHAT, dict(messages=HI, functions=[1]), "functions"),
        (CHAT, dict(messages=HI, stream=5), "stream"),
        (CHAT, dict(messages=HI, stream=True, stream_options=dict(x=1)), "stream_options.x"),
        (CHAT, dict(messages=HI, stream=True, stream_options=dict(include_usage=1)),
         "stream_options.include_usage"),
        (CHAT, dict(messages=HI, top_logprobs=2), "top_logprobs"),
        (CHAT, dict(messages=HI, response_format=dict(type="x")), "response_format"),
        (CHAT, dict(messages=HI, response_format=dict(type="text", x=1)), "response_format.x"),
        (CHAT, dict(messages=HI, response_format=dict(type="json_schema", json_schema=5)),
         "response_format.json_schema"),
        (CHAT, dict(messages=HI, response_format=dict(type="json_schema",
         json_schema=dict(name="x", schema=5))), "response_format"),
        (CHAT, dict(messages=HI, guided_regex="a", structured_outputs={}), "guided_regex"),
        (CHAT, dict(messages=HI, max_tokens=1, max_completion_tokens=1), "max_tokens"),
        (COMPLETIONS, dict(prompt="a", stop=[5]), "stop"),
        (COMPLETIONS, dict(prompt="a", best_of=True), "best_of"),
        (COMPLETIONS, dict(prompt="a", messages=HI), "messages"),
        (COMPLETIONS, dict(prompt="a", logit_bias={"x": 1}), "logit_bias"),
    ],
)  # fmt: skip
def test_an_error_has_the_field_that_its_message_names(url: str, body: Any, param: str) -> None:
    error = refused(parse_body, url, body, {})
    assert (param_of(error, url), error.status) == (param, 400), str(error)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (dict(response_format=dict(type="json_object")), "response_format"),
        (dict(guided_json={}), "guided_json"),
        (dict(structured_outputs=dict(json={})), "structured_outputs"),
        (dict(), "structured_outputs"),
    ],
)
def test_the_field_of_a_constraint_is_the_one_that_was_sent(body: Any, field: str) -> None:
    """Only compiling finds some mistakes in schemas, and it knows no names of fields."""
    assert parse_body(CHAT, dict(messages=HI, **body), {}).constraint == field


def test_apis_of_their_own_have_their_own_names() -> None:
    tools = [{"type": "function", "parameters": 5}]
    error = refused(parse_response, dict(input="a", max_output_tokens=0), [], True)
    assert error_event(error)["param"] == "max_output_tokens"
    error = refused(parse_response, dict(input=[{"role": "x"}]), [], True)
    assert param_of(error, RESPONSES) == "input[0].role"
    error = refused(parse_response, dict(input="a", tools=[{"type": "x"}, *tools]), [], True)
    assert param_of(error, RESPONSES) == "tools[0].type"
    error = refused(parse_embeddings, dict(input="a", encoding_format="x"))
    assert param_of(error, EMBEDDINGS) == "encoding_format"
    own = error_response(refused(chat_of, dict(max_tokens=1)), "/v1/messages")
    assert json.loads(bytes(own.body))["error"].keys() == {"type", "message"}


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_of_another_api_is_named(name: str) -> None:
    error = refused(parse_response, {"input": "a", name: 1}, [], True)
    assert param_of(error, RESPONSES) == error_event(error)["param"] == name


def test_a_prompt_that_is_too_long_is_the_field_that_it_was_made_of() -> None:
    error = as_api_error(PromptTooLongError("prompt must have 1 to 5 tokens (x), got 6"))
    assert param_of(error, CHAT) == "messages"
    assert param_of(error, COMPLETIONS) == "prompt"
    assert param_of(error, RESPONSES) == "input"
    assert param_of("prompt[1]: prompt must have 1 to 5 tokens", COMPLETIONS) == "prompt[1]"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (CHAT, "prompts times n must be at most 5, got 2 times 3"),
        (CHAT, "the body is not valid JSON: x"),
        ("/health", "top_p must be 1"),
        ("/no_path", "messages must be a list"),
    ],
)
def test_other_errors_name_no_field(url: str, message: str) -> None:
    assert param_of(message, url) is None


def test_only_errors_of_a_body_name_fields() -> None:
    """The model of a request that does not exist is named, as in vLLM; a missing key is not."""
    missing = APIError(404, "model 'x' does not exist; this server has: m", "model_not_found")
    assert param_of(missing, CHAT) == "model"
    assert param_of(APIError(503, "model 'x' sleeps"), CHAT) is None


@pytest.mark.parametrize(
    ("python", "wanted"),
    [
        ("a must be a number >= 0, got True", "a must be a number >= 0, got true"),
        ("a must be an int >= 1, got 'x'", 'a must be an integer >= 1, got "x"'),
        ("a must be a list of ids, got {'b': None}", 'a must be an array of ids, got {"b": null}'),
        ("a must be None with b, got ['it\\'s']", 'a must be null with b, got ["it\'s"]'),
        ("a must be 'a list' or a dict, got 1", "a must be 'a list' or an object, got 1"),
        ("a must be b, got \"it's None\"", "a must be b, got \"it's None\""),
        ("a must be x, got 'user'; did you mean 'users'?",
         "a must be x, got \"user\"; did you mean 'users'?"),
        ("a must be all or lists of ids", "a must be all or arrays of ids"),
        ("a must be x, got '\\ud800'", 'a must be x, got "\\ud800"'),
        ("a must be x, got 'cut off", "a must be x, got 'cut off"),
        ("unknown field 'None'", "unknown field 'None'"),
        ("None is a name; Nonesuch is another", "null is a name; Nonesuch is another"),
    ],
)  # fmt: skip
def test_errors_have_the_words_of_json(python: str, wanted: str) -> None:
    assert in_json_words(python) == wanted
    assert str(as_api_error(ValueError(python))) == wanted
    assert in_json_words(wanted) == wanted
