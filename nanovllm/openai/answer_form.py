"""AnswerForm: what a request asks of the form of its answer, next to the usual fields."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from nanovllm.utils.checks import check_int, check_name
from nanovllm.utils.json_text import check_json_bool

STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")


class AnswerForm(NamedTuple):
    """The form of an answer.

    includes_usage    a stream's last chunk has the usage
    usage_each        each chunk of a stream has the usage of its sample so far
    returns_ids       the prompt's token ids are returned too; if False, no token ids at all
    ids_as_tokens     log-probabilities name tokens by their ids: "token_id:5"
    hides_reasoning   reasoning is left out
    prompt_only       only the prompt is returned: the one token that is generated is dropped
    num_best          the number of samples to return: those with the best mean log-probability
    hides_logprobs    log-probabilities are only needed to choose these samples
    """

    includes_usage: bool = False
    usage_each: bool = False
    returns_ids: bool | None = None
    ids_as_tokens: bool = False
    hides_reasoning: bool = False
    prompt_only: bool = False
    num_best: int | None = None
    hides_logprobs: bool = False


USUAL = AnswerForm()


def answer_form(body: Mapping[str, Any], streams: bool) -> AnswerForm:
    """The form that a body asks for."""
    options = _stream_options(body.get("stream_options"), streams)
    num_best = _num_best(body, streams)
    return AnswerForm(
        includes_usage=options.get("include_usage", False),
        usage_each=options.get("continuous_usage_stats", False),
        returns_ids=body.get("return_token_ids"),
        ids_as_tokens=body.get("return_tokens_as_token_ids", False),
        hides_reasoning=not body.get("include_reasoning", True),
        prompt_only=asks_for_prompt(body),
        num_best=num_best,
        hides_logprobs=num_best is not None and "logprobs" not in body,
    )


def asks_for_prompt(body: Mapping[str, Any]) -> bool:
    """Whether a body asks for its prompt alone: `max_tokens` of 0, with `echo`."""
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in body]
    values = [body[name] for name in names]
    return body.get("echo") is True and any(type(one) is int and one == 0 for one in values)


def _num_best(body: Mapping[str, Any], streams: bool) -> int | None:
    """How many of `best_of` samples are returned; None if it is all of them."""
    n, best_of = body.get("n", 1), body.get("best_of", 1)
    if best_of == 1 and (n == 1 or body.get("best_of") is None):
        return None
    check_int("n (with best_of)", n, 1, best_of)
    if streams:
        raise ValueError("best_of must not be streamed: all samples must have ended")
    return int(n) if n < best_of else None


def _stream_options(options: Any, streams: bool) -> dict[str, bool]:
    if options is None:
        return {}
    if not streams:
        raise ValueError("stream_options needs stream to be true")
    for name in options:
        check_name(name, STREAM_OPTIONS, "stream_options: ")
    return {
        name: check_json_bool(f"stream_options.{name}", value)
        for name, value in options.items()
        if value is not None
    }
