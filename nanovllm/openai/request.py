"""What a line of a batch asks for: OpenAI's batch format, or a plain line with the same fields.

It checks names and makes `SamplingParams`, which check values. It knows no engine. Nothing is taken
and then ignored: a field that is not known is an error, and so is a known one with a value that
asks for more than there is.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_bool, check_int, did_you_mean, shorten

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENVELOPE = ("custom_id", "method", "url", "body")
SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingParams))
INPUTS = {CHAT: ("messages", "tools", "chat_template_kwargs"), COMPLETIONS: ("prompt",)}
OPENAI_NAMES = ("max_completion_tokens", "top_logprobs")
NOTES = ("model", "user", "metadata")  # said about a request; no answer hangs on them
# Fields that may only say what happens anyway.
FIXED: dict[str, Any] = {
    "stream": False, "echo": False, "best_of": 1, "store": False,
    "response_format": {"type": "text"},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line's request: a conversation or a prompt, what goes with it, and how to sample it."""

    url: str
    prompt: Any  # a conversation where the url is CHAT
    template_options: Mapping[str, Any]
    params: SamplingParams
    model: str | None


def parse_line(data: bytes | None) -> dict[str, Any]:
    """The JSON object of a line."""
    if data is None:
        raise ValueError("the line is too long")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is not valid UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the line is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise TypeError(f"a line must be a JSON object, got {shorten(value)}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON's parser would take the last of equal names, and say nothing."""
    value = dict(pairs)
    if len(value) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shorten(name)} is there twice")
    return value


def parse_request(line: Mapping[str, Any], defaults: Mapping[str, Any]) -> BatchRequest:
    """What a line asks for; `defaults` are sampling parameters for lines that do not say.

    A field that is null is one that is not there.
    """
    url, body = _open_envelope(line)
    body = {name: value for name, value in body.items() if value is not None}
    for name, value in body.items():
        _check_name(name, (*INPUTS[url], *SAMPLING, *OPENAI_NAMES, *NOTES, *FIXED))
        if name in FIXED and (value != FIXED[name] or type(value) is not type(FIXED[name])):
            raise ValueError(f"{name} must be {FIXED[name]!r} here, got {shorten(value)}")
    if not isinstance(body.get("model", ""), str):
        raise TypeError(f"model must be a text, got {shorten(body['model'])}")
    prompt_name, *option_names = INPUTS[url]
    if prompt_name not in body:
        raise ValueError(f"{prompt_name} is missing")
    prompt = body[prompt_name]
    if url == COMPLETIONS and isinstance(prompt, list) and any(isinstance(p, str) for p in prompt):
        raise ValueError("prompt must be one text or one list of token ids: a line is one request")
    return BatchRequest(
        url=url,
        prompt=_messages(prompt) if url == CHAT else prompt,
        template_options={name: body[name] for name in option_names if name in body},
        params=SamplingParams(**{**defaults, **_sampling(body)}),
        model=body.get("model"),
    )


def _open_envelope(line: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The endpoint and the body of a line; a plain one's fields are its body."""
    if not line.keys() & {"method", "url", "body"}:
        plain = {name: value for name, value in line.items() if name != "custom_id"}
        if ("prompt" in plain) == ("messages" in plain):
            many = "and not both, " if "prompt" in plain else ""
            raise ValueError(
                f"a line must have a prompt or messages, {many}or else method, url and body"
            )
        return (CHAT if "messages" in plain else COMPLETIONS), plain
    for name in line:
        _check_name(name, ENVELOPE)
    for name in ENVELOPE:
        if line.get(name) is None:
            raise ValueError(f"{name} is missing")
    if line["method"] != "POST":
        raise ValueError(f"method must be 'POST', got {shorten(line['method'])}")
    if line["url"] not in (CHAT, COMPLETIONS):
        raise ValueError(f"url must be {CHAT!r} or {COMPLETIONS!r}, got {shorten(line['url'])}")
    if not isinstance(line["body"], dict):
        raise TypeError(f"body must be an object, got {shorten(line['body'])}")
    return line["url"], line["body"]


def _check_name(name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ValueError(f"unknown field {shorten(name)}{did_you_mean(name, known)}")


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of SamplingParams, from its own names and OpenAI's."""
    fields = {name: body[name] for name in SAMPLING if name in body}
    if "max_completion_tokens" in body:
        if "max_tokens" in body:
            raise ValueError("max_tokens and max_completion_tokens are one; give one of them")
        fields["max_tokens"] = body["max_completion_tokens"]
    if isinstance(body.get("logprobs"), bool) or "top_logprobs" in body:
        fields["logprobs"] = _chat_logprobs(body)
    if isinstance(biases := body.get("logit_bias"), dict):
        fields["logit_bias"] = {_token_id(token): bias for token, bias in biases.items()}
    return fields


def _chat_logprobs(body: Mapping[str, Any]) -> int | None:
    """A chat says whether there are any, and then how many."""
    wanted, top = body.get("logprobs", False), body.get("top_logprobs")
    check_bool("logprobs (with top_logprobs)", wanted)
    if top is not None and not wanted:
        raise ValueError("top_logprobs needs logprobs to be true")
    return check_int("top_logprobs", top or 0, 0) if wanted else None


def _token_id(text: str) -> int:
    """The keys of JSON objects are texts."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"logit_bias must have token ids as keys, got {shorten(text)}")
    return int(text)


def _messages(messages: Any) -> Any:
    """A conversation whose contents are texts; parts of text are put together."""
    if not isinstance(messages, list):
        raise TypeError(f"messages must be a list of messages, got {shorten(messages)}")
    return [
        {**message, "content": _joined(message["content"])}
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _joined(parts: list[Any]) -> str:
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or "text" not in part:
            raise ValueError(f"content must be text or parts of text, got {shorten(part)}")
        if not isinstance(part["text"], str):
            raise TypeError(f"content must be text, got {shorten(part['text'])}")
    return "".join(part["text"] for part in parts)
