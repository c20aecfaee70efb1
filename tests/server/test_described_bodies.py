"""The schemas of /openapi.json: what a parser takes fits them, and ranges are those of checks."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jsonschema
import pytest
from test_odd_bodies import MESSAGE, ODD, RESPONSE, message, response

from nanovllm.openai.fields import CHAT, COMPLETIONS
from nanovllm.openai.pooling import parse_pooling
from nanovllm.openai.request import parse_body
from nanovllm.openai.vectors import parse_embeddings, parse_rerank, parse_score
from nanovllm.server.described.bodies import BODIES
from nanovllm.server.described.document import schema_of
from nanovllm.server.described.fields import COMPONENTS, bounds, or_null
from nanovllm.server.limits import Limits
from nanovllm.server.refusals import limit_schemas
from nanovllm.utils.option import float_range, int_range

IN_RANGE = (0, 1, 2, 20, -2, 0.5, ["a"], [1], "auto", "float", "low", {"1": 2}, False)
LIMITS = limit_schemas(Limits(), 1000)
HI = [{"role": "user", "content": "Hi"}]
# A body of each path, with the fields that must be given.
LEAST: dict[str, tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]] = {
    CHAT: (lambda body: parse_body(CHAT, body, {}), {"messages": HI}),
    COMPLETIONS: (lambda body: parse_body(COMPLETIONS, body, {}), {"prompt": "a"}),
    "/v1/responses": (response, {"input": "a"}),
    "/v1/messages": (message, {"messages": HI, "max_tokens": 5}),
    "/v1/embeddings": (parse_embeddings, {"input": "a"}),
    "/pooling": (parse_pooling, {"input": "a"}),
    "/score": (parse_score, {"queries": "a", "documents": "b"}),
    "/rerank": (parse_rerank, {"query": "a", "documents": ["b"]}),
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
GOOD = {
    CHAT: {
        "messages": [*HI, {"role": "assistant", "content": None, "tool_calls": []}], "n": 2,
        "logprobs": True, "top_logprobs": 2, "tools": [TOOL], "tool_choice": "auto", "seed": None,
        "stop": "a", "documents": [{"title": "a"}], "response_format": {"type": "text"},
        "logit_bias": {"5": -1}, "thinking": {"type": "enabled"}, "stream": False, "top_k": -1,
        "max_completion_tokens": 5, "functions": [], "user": "a", "metadata": {"a": "b"},
    },
    COMPLETIONS: {
        "prompt": [[1, 2], "a"], "echo": True, "max_tokens": 0, "logprobs": 0, "best_of": 1,
        "stop": ["a", "b"], "allowed_token_ids": [1], "truncate_prompt_tokens": -1, "suffix": None,
    },
    "/v1/responses": RESPONSE, "/v1/messages": MESSAGE,
    "/v1/embeddings": {"input": [[1], [2]], "encoding_format": "base64", "dimensions": 4},
    "/pooling": {"input": [1, 2], "task": "embed", "normalize": True},
    "/score": {"text_1": "a", "data_2": ["b"], "method": None},
    "/rerank": {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 2},
}  # fmt: skip


# Checked after the parser, by the template, the tokenizer or the engine.
LATER = (
    "messages", "prompt", "input", "queries", "documents", "text_1", "text_2", "data_1", "data_2",
    "tools", "tool_choice", "chat_template", "chat_template_kwargs", "thinking_token_budget",
    "instruction", "method", "prompt_name", "pooling", "dimensions",
    "truncate_prompt_tokens",
)  # fmt: skip


@functools.cache
def schema(path: str, limited: bool = True) -> Mapping[str, Any]:
    found: Mapping[str, Any] = schema_of(BODIES[path], LIMITS if limited else {})
    return found


def errors(part: Mapping[str, Any], value: Any) -> list[str]:
    whole = {**part, "components": {"schemas": COMPONENTS}}
    return [one.message for one in jsonschema.Draft202012Validator(whole).iter_errors(value)]


@pytest.mark.parametrize("path", GOOD)
def test_real_bodies_fit(path: str) -> None:
    """Those that the tests of their parsers have."""
    LEAST[path][0](dict(GOOD[path]))
    assert errors(schema(path), GOOD[path]) == []
    jsonschema.Draft202012Validator.check_schema(dict(schema(path)))


@pytest.mark.parametrize("path", LEAST)
def test_a_value_that_a_parser_takes_fits(path: str) -> None:
    """A client that checks its bodies by the description can send all that the server takes."""
    parse, least = LEAST[path]
    refused = 0
    for name, part in schema(path, limited=False)["properties"].items():
        for value in (*ODD, *IN_RANGE):
            found = errors(part, value)
            refused += bool(found)
            try:
                parse({**least, name: value})
            except Exception:
                continue
            if name in LATER:
                continue
            assert found == [], (name, value)
    assert refused > len(schema(path)["properties"]), "schemas that say nothing"


def test_ranges_are_those_of_the_checks() -> None:
    chat = schema(CHAT)["properties"]
    for name, keywords in {
        "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0.0, "maximum": 1.0},
        "temperature": {"minimum": 0.0}, "seed": {"minimum": 0, "maximum": 2**63 - 1},
        "presence_penalty": {"minimum": -2.0, "maximum": 2.0}, "n": {"minimum": 1},
        "stop": {"type": ["string", "array", "null"], "maxItems": 64},
        "bad_words": {"maxItems": 10_000}, "prompt_logprobs": {"maximum": 20},
        "logprobs": {"type": ["boolean", "integer", "null"], "maximum": 20},
        "top_logprobs": {"maximum": 20}, "stop_token_ids": {"maxItems": 1000},
        "documents": {"type": ["array", "null"], "items": {"type": "object"}},
    }.items():  # fmt: skip
        assert keywords.items() <= chat[name].items(), name
    assert schema("/v1/responses")["properties"]["input"]["type"] == ["string", "array"]
    assert chat["messages"]["type"] == "array", "it must be given"
    assert chat["ignore_eos"]["description"].endswith("must be true or false")
    assert schema("/rerank")["properties"]["top_n"]["minimum"] == 1


def test_every_range_of_a_rule_is_read() -> None:
    """The words of a rule are made in one place; here they are read."""
    assert bounds(int_range(3).allowed) == {"minimum": 3}
    assert bounds(int_range(-1, 5).allowed) == {"minimum": -1, "maximum": 5}
    assert bounds(float_range(0.0, above=True).allowed) == {"exclusiveMinimum": 0.0}
    assert bounds(float_range(-0.5, 1.5, above=True).allowed) == {
        "exclusiveMinimum": -0.5, "maximum": 1.5,
    }  # fmt: skip
    assert bounds("a list of texts") == bounds("-1 or >= 1") == {}


def test_a_field_may_be_null() -> None:
    assert or_null({"type": "string", "enum": ["a"]}) == {
        "type": ["string", "null"], "enum": ["a", None],
    }  # fmt: skip
    assert or_null({"$ref": "#/x"}) == {"anyOf": [{"$ref": "#/x"}, {"type": "null"}]}
    assert or_null({}) == {}
