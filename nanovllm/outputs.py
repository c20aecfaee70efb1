"""What `generate` returns."""

from typing import Literal, TypedDict

FinishReason = Literal["stop", "length", "abort"]


class RequestOutput(TypedDict):
    """The result of one request.

    `token_ids` holds the generated tokens with those that stopped it; `text` is their decoding up
    to a stop string (empty where the model came without a tokenizer). `stop_reason` is the stop
    token id or the stop string that ended the request, None for EOS and for other endings.
    `num_cached_tokens` counts the prompt tokens found in the prefix cache on first admission.
    """

    request_id: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_cached_tokens: int


class StreamEvent(TypedDict):
    """What a step has brought for one of the prompts of `stream`.

    `index` is the prompt's place in the call. All `text`s of a prompt together are its output's
    text, all `token_ids` its token ids; `finish_reason` is None until the last event.
    """

    index: int
    request_id: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
