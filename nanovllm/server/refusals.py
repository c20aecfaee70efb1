"""Refuse requests that ask for more than the server's Limits allow."""

import json
from collections.abc import Collection, Mapping
from typing import Any

import orjson

from nanovllm.beam_search_params import BeamSearchParams
from nanovllm.beams.search import candidates_per_beam
from nanovllm.chat.conversation import given_template
from nanovllm.openai.guided import GUIDED
from nanovllm.openai.request import CHAT, APIRequest
from nanovllm.server.errors import APIError
from nanovllm.server.limits import Limits

MOST_LISTED = {"stop": "max_stops", "bad_words": "max_bad_words"}  # texts in these fields
ID_LISTS = ("stop_token_ids", "allowed_token_ids")  # have at most as many ids as the vocabulary
LOGPROBS = ("logprobs", "prompt_logprobs")  # are at most `max_logprobs`


def limit_schemas(limits: Limits, vocab_size: int) -> dict[str, dict[str, Any]]:
    """The limits of single fields, as keywords of JSON schemas."""
    return {
        **{name: {"maxItems": getattr(limits, limit)} for name, limit in MOST_LISTED.items()},
        **{name: {"maxItems": vocab_size} for name in ID_LISTS},
        **{name: {"maximum": limits.max_logprobs} for name in (*LOGPROBS, "top_logprobs")},
    }


def check_body(body: Mapping[str, Any], limits: Limits) -> None:
    """Raise if fields of a body are too long to be read. Wrong types have other errors, later."""
    for name, limit in MOST_LISTED.items():
        _check_number(name, body.get(name), limit, limits)
    _check_stops(body.get("stop"), limits)
    _check_grammar(body, limits)


def check_asked(asked: APIRequest, limits: Limits, vocab_size: int) -> None:
    """Raise if a request asks for more than the limits, or than can be streamed."""
    _check_id_lists(asked, vocab_size)
    _check_logprobs(asked, limits)
    if asked.streams and asked.echo and asked.params.logprobs is not None:
        raise APIError(400, "echo with logprobs must not be streamed")
    if asked.streams and asked.params.prompt_logprobs is not None:
        raise APIError(400, "prompt_logprobs must not be streamed")


def _check_stops(stops: Any, limits: Limits) -> None:
    """Raise for too many characters in stop texts."""
    listed = stops if isinstance(stops, list) else [stops]
    num_chars = sum(len(stop) for stop in listed if isinstance(stop, str))
    if num_chars > limits.max_stop_chars:
        raise APIError(
            400, f"stop must have at most {limits.max_stop_chars} characters in all"
            f" (max_stop_chars), got {num_chars}"
        )  # fmt: skip


def _check_grammar(body: Mapping[str, Any], limits: Limits) -> None:
    """Raise if a constraint is too large as JSON."""
    for name in ("structured_outputs", "response_format", *GUIDED):
        value = body.get(name)
        if isinstance(value, dict) or name in GUIDED:
            size = -(-_json_size(value) // 1024)
            if size > limits.max_grammar_kib:
                raise APIError(
                    400, f"{name} must have at most {limits.max_grammar_kib} KiB"
                    f" (max_grammar_kib), got {size}"
                )  # fmt: skip


def _json_size(value: Any) -> int:
    try:
        return len(orjson.dumps(value))
    except TypeError:  # it has an integer of more than 64 bits, or half a character
        return len(json.dumps(value))


def _check_number(name: str, texts: Any, limit: str, limits: Limits) -> None:
    """Raise for too many texts, which would be looked for, or tokenized."""
    most: int = getattr(limits, limit)
    if isinstance(texts, list) and len(texts) > most:
        raise APIError(400, f"{name} must have at most {most} texts ({limit}), got {len(texts)}")


def _check_logprobs(asked: APIRequest, limits: Limits) -> None:
    """Raise for too many log-probabilities."""
    most = limits.max_logprobs
    for name in LOGPROBS:
        number = getattr(asked.params, name)
        if number is not None and number > most:
            name = "top_logprobs" if name == "logprobs" and asked.url == CHAT else name
            raise APIError(400, f"{name} must be at most {most} (max_logprobs), got {number}")


def check_beams(beams: BeamSearchParams, limits: Limits, eos_token_ids: Collection[int]) -> None:
    """Raise for a wide search: each of its steps needs several log-probabilities for each beam."""
    each = candidates_per_beam(() if beams.ignore_eos else eos_token_ids)
    if each * beams.beam_width > limits.max_logprobs:
        raise APIError(
            400, f"n must be at most {limits.max_logprobs // each} with use_beam_search, which is"
            f" {limits.max_logprobs} (max_logprobs) by {each} tokens for each beam, got"
            f" {beams.beam_width}"
        )  # fmt: skip


def _check_id_lists(asked: APIRequest, vocab_size: int) -> None:
    """Raise for a list of token ids that is longer than the vocabulary."""
    for name in ID_LISTS:
        number = len(getattr(asked.params, name) or ())
        if number > vocab_size:
            raise APIError(
                400, f"{name} must have at most {vocab_size} ids (vocab_size), got {number}"
            )


def check_tokens(asked: APIRequest, limits: Limits, longest: int) -> None:
    """Raise for too many tokens in all. One sample may have all that a model of `longest` takes."""
    num_prompts, n, most = len(asked.prompts), asked.params.n, limits.max_request_tokens
    each = min(asked.params.max_tokens or longest, longest)
    if num_prompts * n > 1 and num_prompts * n * each > most:
        raise APIError(
            400, f"prompts times n times max_tokens must be at most {most} (max_request_tokens),"
            f" got {num_prompts} times {n} times {each}"
        )  # fmt: skip


def check_truncated(prompts: Any, kept: int | None, limits: Limits) -> None:
    """Raise for a prompt that is too long to be tokenized and then cut to `kept` tokens."""
    most, listed = limits.max_tokenize_chars, isinstance(prompts, list)
    if kept is None:
        return
    for prompt in prompts if listed else [prompts]:
        salted = isinstance(prompt, Mapping)
        if (number := num_chars({**prompt, "cache_salt": None} if salted else prompt)) > most:
            raise APIError(
                400, f"truncate_prompt_tokens needs a prompt of at most {most} characters"
                f" (max_tokenize_chars), got {number}"
            )  # fmt: skip


def num_chars(value: Any) -> int:
    """The characters of all texts in a value, such as a conversation."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return sum(map(num_chars, value))
    return len(value) if isinstance(value, str) else 0


def refuse_priority(asked: APIRequest, defaults: Mapping[str, Any]) -> None:
    """Raise if a request chooses its priority."""
    if asked.params.priority != defaults.get("priority", 0):
        raise APIError(400, "priority: this server takes none from requests (--allow-priority)")


def refuse_templates(asked: APIRequest) -> None:
    """Raise if a chat brings its own template."""
    if given_template(asked.chat_options) is not None:
        raise APIError(
            400, "chat_template: this server takes no templates (--trust-request-chat-template)"
        )
