"""What `generate` returns."""

from typing import Literal, TypedDict

FinishReason = Literal["stop", "length", "abort"]


class RequestOutput(TypedDict):
    """The result of one request.

    `token_ids` holds the generated tokens with the one that stopped it; `text` is their decoding
    without special tokens (empty where the model came without a tokenizer). `stop_reason` is the
    stop token id that ended the request, None for EOS and for other endings.
    `num_cached_tokens` counts the prompt tokens found in the prefix cache on first admission.
    """

    request_id: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_cached_tokens: int
