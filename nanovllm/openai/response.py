"""What a line of the output looks like: OpenAI's batch output, an object for each request.

`id` holds the number of the input's line, which is how a job knows later what it has done.
"""

import json
import time
from typing import Any

from nanovllm.llm import LLM
from nanovllm.openai.request import CHAT, BatchRequest
from nanovllm.openai.token_bytes import token_bytes
from nanovllm.outputs import CompletionOutput, RequestOutput, TokenLogprob

ID = "batch_req_"
START = f'{{"id": "{ID}'.encode()  # of every record


def result_record(
    number: int, custom_id: str, request: BatchRequest, output: RequestOutput, llm: LLM
) -> bytes:
    """The record of a request that `llm` has computed."""
    body = response_body(str(number), request, output, llm)
    response = {"status_code": 200, "request_id": f"req_{number}", "body": body}
    return _record(number, custom_id, response, None)


def response_body(
    name: str, request: BatchRequest, output: RequestOutput, llm: LLM
) -> dict[str, Any]:
    """OpenAI's answer to a request that `llm` has computed; `name` becomes a part of its `id`."""
    if request.url == CHAT:
        body = _chat_body(name, output, request, llm.tokenizer)
    else:
        body = _completion_body(name, output, request)
    num_tokens = sum(len(sample["token_ids"]) for sample in output["outputs"])
    body |= {
        "created": int(time.time()),
        "model": request.model or llm.config.model,
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


def error_record(number: int, custom_id: str, message: str) -> bytes:
    """The record of a line that cannot be computed."""
    error = {"code": "invalid_request", "message": f"line {number}: {message}", "line": number}
    return _record(number, custom_id, None, error)


def _record(number: int, custom_id: str, response: Any, error: Any) -> bytes:
    record = dict(id=f"{ID}{number}", custom_id=custom_id, response=response, error=error)
    return json.dumps(record).encode() + b"\n"


def _chat_body(
    name: str, output: RequestOutput, request: BatchRequest, tokenizer: Any
) -> dict[str, Any]:
    choices = [
        {
            "index": sample["index"],
            "message": {"role": "assistant", "content": sample["text"]},
            "logprobs": _chat_logprobs(sample["logprobs"], request.params.logprobs, tokenizer),
            **_ending(sample),
        }
        for sample in output["outputs"]
    ]
    return {"id": f"chatcmpl-{name}", "object": "chat.completion", "choices": choices}


def _completion_body(name: str, output: RequestOutput, request: BatchRequest) -> dict[str, Any]:
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
    """OpenAI's `finish_reason`, and what we have beside it."""
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
    """Of tokens with equal texts, such as parts of characters, the first is told."""
    told: dict[str, float] = {}
    for token in tokens:
        told.setdefault(token["text"], token["logprob"])
    return told


def _likeliest(likely: list[TokenLogprob], top: int | None) -> list[TokenLogprob]:
    """The `top` ones, in order; the token that came stands first in `likely`, whatever its rank."""
    return sorted(likely, key=lambda token: token["rank"])[:top]
