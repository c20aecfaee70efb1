"""Make the body that answers a request, in the form of OpenAI's API.

`stop_reason`, `token_ids`, `prompt_token_ids` and `prompt_logprobs` are additions, the same as
vLLM's. `fields_without_effect` is our own.
"""

import itertools
import time
from collections.abc import Sequence
from typing import Any

from nanovllm.openai.answer_form import AnswerForm
from nanovllm.openai.best_samples import returned_samples
from nanovllm.openai.logprobs import (
    Logprobs,
    Pack,
    as_it_is,
    chat_logprobs,
    completion_logprobs,
    prompt_entries,
)
from nanovllm.openai.long_texts import decoded
from nanovllm.openai.request import CHAT, APIRequest
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.slices import Steps

CHARS_PARSED = 64  # in the time of one unit of work


def response_body(
    name: str,
    request: APIRequest,
    outputs: Sequence[RequestOutput],
    model: str,
    tokenizer: Any,
    pack: Pack = as_it_is,
) -> Steps[dict[str, Any]]:
    """Make the body that answers a request; `name` becomes a part of its `id`.

    `outputs` are those of its prompts. `model` is the name for requests that give none. Each
    token's log-probabilities are kept as `pack` returns them.
    """
    is_chat = request.url == CHAT
    write = _chat_choice if is_chat else _completion_choice
    choices = []
    of_prompt = None
    form = request.form
    for place, output in enumerate(outputs):
        of_prompt, ids = None, _prompt_ids(output, form)
        if not request.echo:
            of_prompt = yield from prompt_entries(output["prompt_logprobs"], pack)
        samples = returned_samples(output, form)
        for sample in samples:
            written = yield from write(output, sample, request, tokenizer, pack)
            yield 1 + len(sample["text"]) // CHARS_PARSED
            choices.append(
                {
                    "index": place * len(samples) + sample["index"],
                    **written,
                    **({} if is_chat or of_prompt is None else {"prompt_logprobs": of_prompt}),
                    "stop_reason": sample["stop_reason"],
                    **({} if form.returns_ids is False else {"token_ids": sample["token_ids"]}),
                    **({} if is_chat else ids),
                }
            )
    body = {
        "id": response_id(name, request),
        "object": "chat.completion" if is_chat else "text_completion",
        "choices": choices,
        "created": int(time.time()),
        "model": request.model or model,
        "usage": usage(
            sum(output["num_prompt_tokens"] for output in outputs),
            0 if form.prompt_only else sum(map(_num_generated, outputs)),
            sum(output["num_cached_tokens"] for output in outputs),
        ),
        **({"fields_without_effect": request.no_effect} if request.no_effect else {}),
        **(ids if is_chat else {}),
    }
    if len(outputs) == 1 and of_prompt is not None:
        body["prompt_logprobs"] = of_prompt
    return body


def _num_generated(output: RequestOutput) -> int:
    return sum(len(sample["token_ids"]) for sample in output["outputs"])


def _prompt_ids(output: RequestOutput, form: AnswerForm) -> dict[str, Any]:
    """The prompt's token ids, if they are asked for."""
    return {"prompt_token_ids": output["prompt_token_ids"]} if form.returns_ids else {}


def response_id(name: str, request: APIRequest) -> str:
    """The id of a response; `name` is a part of it."""
    return f"{'chatcmpl' if request.url == CHAT else 'cmpl'}-{request.name or name}"


def usage(num_prompt_tokens: int, num_tokens: int, num_cached_tokens: int | None) -> dict[str, Any]:
    """How many tokens a request had. How many were cached may not be known yet."""
    counts = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }
    if num_cached_tokens is None:
        return counts
    return {**counts, "prompt_tokens_details": {"cached_tokens": num_cached_tokens}}


def finish_reason(reason: str | None, has_calls: bool) -> str | None:
    """OpenAI's name for how a sample has ended."""
    return "tool_calls" if has_calls and reason == "stop" else reason


def echoed_text(
    prompt: str | None, prompt_token_ids: list[int], params: SamplingParams, tokenizer: Any
) -> str:
    """The text of a prompt, which may be given only as token ids, or be cut to its last tokens."""
    if prompt is not None and params.truncate_prompt_tokens is None:
        return prompt
    return decoded(tokenizer, prompt_token_ids)


def _chat_choice(
    output: RequestOutput,  # noqa: ARG001
    sample: CompletionOutput,
    request: APIRequest,
    tokenizer: Any,
    pack: Pack,
) -> Steps[dict[str, Any]]:
    message = request.answer.message(sample["text"], sample["token_ids"])
    if request.form.hides_reasoning:
        message.pop("reasoning_content", None)
    top, by_id = request.params.logprobs, request.form.ids_as_tokens
    likely = yield from chat_logprobs(sample["logprobs"], top, tokenizer, pack, by_id)
    return {
        "message": message,
        "logprobs": likely,
        "finish_reason": finish_reason(sample["finish_reason"], "tool_calls" in message),
    }


def _completion_choice(
    output: RequestOutput, sample: CompletionOutput, request: APIRequest, tokenizer: Any, pack: Pack
) -> Steps[dict[str, Any]]:
    text, likely = sample["text"], sample["logprobs"]
    if request.echo:
        ids = output["prompt_token_ids"]
        text = echoed_text(output["prompt"], ids, request.params, tokenizer) + text
        likely = _echoed_logprobs(output, likely)
    first_id, top = output["prompt_token_ids"][0], request.params.logprobs
    likely = yield from completion_logprobs(
        likely, top, tokenizer, first_id, pack=pack, by_id=request.form.ids_as_tokens
    )
    return {"text": text, "logprobs": likely, "finish_reason": sample["finish_reason"]}


def _echoed_logprobs(output: RequestOutput, likely: Logprobs | None) -> Logprobs | None:
    """The log-probabilities of the prompt, followed by those of a sample."""
    if likely is None or output["prompt_logprobs"] is None:
        return likely
    return itertools.chain(output["prompt_logprobs"], likely)
