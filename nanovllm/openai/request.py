"""Parse the body of a request to OpenAI's API into a prompt and `SamplingParams`.

Names are checked here, values by `SamplingParams`. Nothing is accepted and then ignored: unknown
fields are errors, and so are values that ask for something that is not supported. It knows no
engine.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.chat.answers import PLAIN, AnswerFormat
from nanovllm.openai.response_format import structured_of
from nanovllm.prompt_dicts import salt_number
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_int, check_name
from nanovllm.utils.json_text import check_json_bool, shorten_json
from nanovllm.utils.option import TRUE_OR_FALSE, options_of
from nanovllm.vllm_names import SAMPLING as VLLM_NAMES

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAMPLING = tuple(options_of(SamplingParams))
BOOLS = tuple(
    name
    for name, described in options_of(SamplingParams).items()
    if described.rule is TRUE_OR_FALSE
)
INPUTS = {
    CHAT: (
        "messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs",
        "cache_salt", "reasoning_effort",
    ),
    COMPLETIONS: ("prompt", "echo", "cache_salt"),
}  # fmt: skip
OPENAI_NAMES = (
    "max_completion_tokens", "top_logprobs", "response_format", "stream", "stream_options",
)  # fmt: skip
# Accepted without effect on the answer.
NOTES = (
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
)  # fmt: skip
# Fields with a single allowed value, which has no effect.
FIXED: dict[str, Any] = {"best_of": 1}
KNOWN = {
    url: dict.fromkeys((*names, *SAMPLING, *OPENAI_NAMES, *NOTES, *FIXED))
    for url, names in INPUTS.items()
}


@dataclass(frozen=True, slots=True)
class APIRequest:
    """The parsed body of a request. If `url` is CHAT, `prompts` is a list of one conversation.

    `chat_options` are further keywords of `LLM.chat`. `answer` says how a chat's answer is parsed.
    With `echo` a completion's text begins with the prompt.
    """

    url: str
    prompts: list[Any]
    chat_options: Mapping[str, Any]
    params: SamplingParams
    model: str | None
    streams: bool = False
    includes_usage: bool = False
    echo: bool = False
    answer: AnswerFormat = PLAIN


def parse_body(url: str, body: Mapping[str, Any], defaults: Mapping[str, Any]) -> APIRequest:
    """Parse a body for `url`; a field that is null counts as missing.

    `defaults` are sampling parameters for bodies without them.
    """
    body = {name: value for name, value in body.items() if value is not None}
    _check_fields(url, body)
    prompt_name, *option_names = INPUTS[url]
    if prompt_name not in body:
        raise ValueError(f"{prompt_name} is missing")
    prompt = body[prompt_name]
    if url == CHAT and not isinstance(prompt, list):
        raise TypeError(f"messages must be a list of messages, got {shorten_json(prompt)}")
    streams = check_json_bool("stream", body.get("stream", False))
    prompts = [prompt] if url == CHAT else prompts_of(prompt_name, prompt)
    if (salt := body.get("cache_salt")) is not None:
        salt_number(salt)  # an error, if it is not valid
        if url == COMPLETIONS:
            prompts = [_salted(prompt, salt) for prompt in prompts]
    return APIRequest(
        url=url,
        prompts=prompts,
        chat_options=_chat_options(body, option_names),
        params=SamplingParams(**{**defaults, **_sampling(body)}),
        model=body.get("model"),
        streams=streams,
        includes_usage=_includes_usage(body.get("stream_options"), streams),
        echo=check_json_bool("echo", body.get("echo", False)),
    )


def _salted(prompt: str | list[int], salt: str) -> dict[str, Any]:
    """A prompt with the salt of its prefixes."""
    name = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return {name: prompt, "cache_salt": salt}


def given_fields(body: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The fields that are not null; others than `names` and the common ones are errors."""
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        check_name(name, (*names, "model", "user"))
    _check_model(given)
    return given


def _check_model(body: Mapping[str, Any]) -> None:
    if not isinstance(body.get("model", ""), str):
        raise TypeError(f"model must be a text, got {shorten_json(body['model'])}")


def _check_fields(url: str, body: Mapping[str, Any]) -> None:
    known = KNOWN[url]
    for name, value in body.items():
        if name in VLLM_NAMES and name not in known:
            why = VLLM_NAMES[name].why.replace("`", "")
            raise ValueError(f"unknown field {name!r}: {why}")
        check_name(name, known)
        if name in SAMPLING and options_of(SamplingParams)[name].only_python and value:
            raise ValueError(f"{name} is for calls in Python, not for requests; leave it out")
        if name in FIXED and (value != FIXED[name] or type(value) is not type(FIXED[name])):
            raise ValueError(f"{name} must be {FIXED[name]!r} here, got {shorten_json(value)}")
    _check_model(body)


def _chat_options(body: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Keywords of a chat; OpenAI's default of `tool_choice` is "auto" if there are tools."""
    given = {name: body[name] for name in names if name in body}
    if "parallel_tool_calls" in given:
        check_json_bool("parallel_tool_calls", given["parallel_tool_calls"])
    return {"tool_choice": "auto", **given} if given.get("tools") else given


def prompts_of(name: str, prompt: Any) -> list[Any]:
    """The prompts in a text, a list of token ids, or a list of either, in the field `name`."""
    if not isinstance(prompt, str | list):
        raise TypeError(
            f"{name} must be a text, token ids or a list of these, got {shorten_json(prompt)}"
        )
    if isinstance(prompt, str) or not any(isinstance(part, str | list) for part in prompt):
        return [prompt]
    if not all(isinstance(part, str | list) for part in prompt):
        raise TypeError(f"{name} must be all token ids, or all texts and lists of token ids")
    return prompt


def _includes_usage(options: Any, streams: bool) -> bool:
    """Whether a stream's last chunk has the usage."""
    if options is None:
        return False
    if not streams:
        raise ValueError("stream_options needs stream to be true")
    if not isinstance(options, Mapping):
        raise TypeError(f"stream_options must be an object, got {shorten_json(options)}")
    for name in options:
        check_name(name, ("include_usage", "include_obfuscation"), "stream_options: ")
    given = options.get("include_usage")
    return given is not None and check_json_bool("stream_options.include_usage", given)


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of SamplingParams, from its own names and OpenAI's."""
    fields = {name: body[name] for name in SAMPLING if name in body}
    for name in fields.keys() & BOOLS:
        check_json_bool(name, fields[name])
    if "max_completion_tokens" in body:
        if "max_tokens" in body:
            raise ValueError("max_tokens and max_completion_tokens are the same; give one of them")
        fields["max_tokens"] = body["max_completion_tokens"]
    if body.get("echo") and "logprobs" in fields:
        fields.setdefault("prompt_logprobs", fields["logprobs"])
    if isinstance(body.get("logprobs"), bool) or "top_logprobs" in body:
        fields["logprobs"] = _num_chat_logprobs(body)
    if "response_format" in body:
        asked = structured_of(body["response_format"])
        if asked is not None and "structured_outputs" in fields:
            raise ValueError("give one of response_format and structured_outputs")
        if asked is not None:
            fields["structured_outputs"] = asked
    if isinstance(biases := body.get("logit_bias"), dict):
        fields["logit_bias"] = {_token_id(token): bias for token, bias in biases.items()}
    return fields


def _num_chat_logprobs(body: Mapping[str, Any]) -> int | None:
    """A chat's `logprobs` is true or false, and `top_logprobs` is their number."""
    wanted, top = body.get("logprobs", False), body.get("top_logprobs")
    check_json_bool("logprobs (with top_logprobs)", wanted)
    if top is not None and not wanted:
        raise ValueError("top_logprobs needs logprobs to be true")
    return check_int("top_logprobs", top or 0, 0) if wanted else None


def _token_id(text: str) -> int:
    """Parse a token id that is the key of a JSON object, where keys are always texts."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"logit_bias must have token ids as keys, got {shorten_json(text)}")
    return int(text)
