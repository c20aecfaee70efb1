"""Make the body that answers a request, as OpenAI's API has it.

`stop_reason`, `token_ids` and `prompt_logprobs` are additions of ours.
"""

import time
from typing import Any

from nanovllm.openai.request import CHAT, APIRequest
from nanovllm.openai.token_bytes import token_bytes
from nanovllm.outputs import CompletionOutput, RequestOutput, TokenLogprob


def response_body(
    name: str, request: APIRequest, output: RequestOutput, model: str, tokenizer: Any
) -> dict[str, Any]:
    """The body that answers a request; `name` becomes a part of its `id`.

    `model` is the name for requests that give none.
    """
    if request.url == CHAT:
        body = _chat_body(name, output, request, tokenizer)
    else:
        body = _completion_body(name, output, request)
    num_tokens = sum(len(sample["token_ids"]) for sample in output["outputs"])
    body |= {
        "created": int(time.time()),
        "model": request.model or model,
        "usage": {
            "prompt_tokens": output["num_prompt_tokens"],
            "completion_tokens": num_tokens,
            "total_tokens": output["num_prompt_tokens"] + num_tokens,
            "prompt_tokens_details": {"cached_tokens": output["num_cached_tokens"]},
        },
    }
    if output["prompt_logprobs"] is not None:
        body["prompt_logprobs"] = output["prompt_logprobs"]
    return body


def _chat_body(
    name: str, output: RequestOutput, request: APIRequest, tokenizer: Any
) -> dict[str, Any]:
    choices = []
    for sample in output["outputs"]:
        message = request.answer.message(sample["text"])
        logprobs = _chat_logprobs(sample["logprobs"], request.params.logprobs, tokenizer)
        choice = {"index": sample["index"], "message": message, "logprobs": logprobs}
        choice |= _ending(sample)
        if "tool_calls" in message and choice["finish_reason"] == "stop":
            choice["finish_reason"] = "tool_calls"
        choices.append(choice)
    return {"id": f"chatcmpl-{name}", "object": "chat.completion", "choices": choices}


def _completion_body(name: str, output: RequestOutput, request: APIRequest) -> dict[str, Any]:
    choices = [
        {
            "index": sample["index"],
            "text": sample["text"],
            "logprobs": _completion_logprobs(sample["logprobs"], request.params.logprobs),
            **_ending(sample),
        }
        for sample in output["outputs"]
    ]
    return {"id": f"cmpl-{name}", "object": "text_completion", "choices": choices}


def _ending(sample: CompletionOutput) -> dict[str, Any]:
    """OpenAI's `finish_reason`, with our additions."""
    return {
        "finish_reason": sample["finish_reason"],
        "stop_reason": sample["stop_reason"],
        "token_ids": sample["token_ids"],
    }


def _chat_logprobs(
    tokens: list[list[TokenLogprob]] | None, top: int | None, tokenizer: Any
) -> dict[str, Any] | None:
    if tokens is None:
        return None
    content = [
        _chat_token(likely[0], tokenizer)
        | {"top_logprobs": [_chat_token(token, tokenizer) for token in _likeliest(likely, top)]}
        for likely in tokens
    ]
    return {"content": content}


def _chat_token(token: TokenLogprob, tokenizer: Any) -> dict[str, Any]:
    data = token_bytes(token["token_id"], token["text"], tokenizer)
    return {"token": token["text"], "logprob": token["logprob"], "bytes": data}


def _completion_logprobs(
    tokens: list[list[TokenLogprob]] | None, top: int | None
) -> dict[str, Any] | None:
    if tokens is None:
        return None
    return {
        "tokens": [likely[0]["text"] for likely in tokens],
        "token_logprobs": [likely[0]["logprob"] for likely in tokens],
        "top_logprobs": [_by_text(_likeliest(likely, top)) for likely in tokens],
    }


def _by_text(tokens: list[TokenLogprob]) -> dict[str, float]:
    """Log-probabilities by text; of tokens with equal texts (parts of characters) the first's."""
    by_text: dict[str, float] = {}
    for token in tokens:
        by_text.setdefault(token["text"], token["logprob"])
    return by_text


def _likeliest(likely: list[TokenLogprob], top: int | None) -> list[TokenLogprob]:
    """The `top` most likely tokens, in order; `likely` starts with the sampled one instead."""
    return sorted(likely, key=lambda token: token["rank"])[:top]
