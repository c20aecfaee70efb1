"""Make the body that answers a request, in the form of OpenAI's API.

`stop_reason`, `token_ids` and `prompt_logprobs` are additions, the same as vLLM's.
"""

import time
from collections.abc import Sequence
from typing import Any

from nanovllm.openai.logprobs import Logprobs, chat_logprobs, completion_logprobs
from nanovllm.openai.request import CHAT, APIRequest
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams


def response_body(
    name: str,
    request: APIRequest,
    outputs: Sequence[RequestOutput],
    model: str,
    tokenizer: Any,
) -> dict[str, Any]:
    """The body that answers a request; `name` becomes a part of its `id`.

    `outputs` are those of its prompts. `model` is the name for requests that give none.
    """
    write = _chat_choice if request.url == CHAT else _completion_choice
    choices = [
        {
            "index": place * request.params.n + sample["index"],
            **write(output, sample, request, tokenizer),
            "stop_reason": sample["stop_reason"],
            "token_ids": sample["token_ids"],
        }
        for place, output in enumerate(outputs)
        for sample in output["outputs"]
    ]
    body = {
        "id": response_id(name, request),
        "object": "chat.completion" if request.url == CHAT else "text_completion",
        "choices": choices,
        "created": int(time.time()),
        "model": request.model or model,
        "usage": usage(
            sum(output["num_prompt_tokens"] for output in outputs),
            sum(len(choice["token_ids"]) for choice in choices),
            sum(output["num_cached_tokens"] for output in outputs),
        ),
    }
    if len(outputs) == 1 and outputs[0]["prompt_logprobs"] is not None and not request.echo:
        body["prompt_logprobs"] = outputs[0]["prompt_logprobs"]
    return body


def response_id(name: str, request: APIRequest) -> str:
    """The id of a response; `name` is a part of it."""
    return f"{'chatcmpl' if request.url == CHAT else 'cmpl'}-{name}"


def usage(num_prompt_tokens: int, num_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """How many tokens a request had."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def finish_reason(reason: str | None, has_calls: bool) -> str | None:
    """OpenAI's name for how a sample has ended."""
    return "tool_calls" if has_calls and reason == "stop" else reason


def echoed_text(
    prompt: str | None, prompt_token_ids: list[int], params: SamplingParams, tokenizer: Any
) -> str:
    """The text of a prompt, which may be given only as token ids, or be cut to its last tokens."""
    if prompt is not None and params.truncate_prompt_tokens is None:
        return prompt
    text: str = tokenizer.decode(prompt_token_ids)
    return text


def _chat_choice(
    output: RequestOutput,  # noqa: ARG001
    sample: CompletionOutput,
    request: APIRequest,
    tokenizer: Any,
) -> dict[str, Any]:
    message = request.answer.message(sample["text"])
    return {
        "message": message,
        "logprobs": chat_logprobs(sample["logprobs"], request.params.logprobs, tokenizer),
        "finish_reason": finish_reason(sample["finish_reason"], "tool_calls" in message),
    }


def _completion_choice(
    output: RequestOutput, sample: CompletionOutput, request: APIRequest, tokenizer: Any
) -> dict[str, Any]:
    text, likely = sample["text"], sample["logprobs"]
    if request.echo:
        ids = output["prompt_token_ids"]
        text = echoed_text(output["prompt"], ids, request.params, tokenizer) + text
        likely = _echoed_logprobs(output, likely)
    choice = {
        "text": text,
        "logprobs": completion_logprobs(
            likely, request.params.logprobs, tokenizer, output["prompt_token_ids"][0]
        ),
        "finish_reason": sample["finish_reason"],
    }
    if output["prompt_logprobs"] is not None and not request.echo:
        choice["prompt_logprobs"] = output["prompt_logprobs"]
    return choice


def _echoed_logprobs(output: RequestOutput, likely: Logprobs | None) -> Logprobs | None:
    """The log-probabilities of the prompt, followed by those of a sample."""
    if likely is None or output["prompt_logprobs"] is None:
        return likely
    return [*output["prompt_logprobs"], *likely]
