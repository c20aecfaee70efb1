"""Log-probabilities in the form of OpenAI's API, for chats and for completions."""

from collections.abc import Sequence
from typing import Any

from nanovllm.openai.token_bytes import token_bytes
from nanovllm.outputs import TokenLogprob

Logprobs = Sequence[list[TokenLogprob] | None]  # None: the first token of a prompt


def chat_logprobs(tokens: Logprobs | None, top: int | None, tokenizer: Any) -> Any:
    """Log-probabilities of a chat's tokens, each with the `top` likeliest ones; or None."""
    if tokens is None:
        return None
    content = [
        _chat_token(likely[0], tokenizer)
        | {"top_logprobs": [_chat_token(token, tokenizer) for token in _likeliest(likely, top)]}
        for likely in tokens
        if likely is not None
    ]
    return {"content": content}


def _chat_token(token: TokenLogprob, tokenizer: Any) -> dict[str, Any]:
    data = token_bytes(token["token_id"], token["text"], tokenizer)
    return {"token": token["text"], "logprob": token["logprob"], "bytes": data}


def completion_logprobs(
    tokens: Logprobs | None,
    top: int | None,
    tokenizer: Any,
    first_token_id: int,
    offset: int = 0,
) -> Any:
    """The log-probabilities of a completion's tokens. Their text begins at `offset`.

    `first_token_id` is the prompt's first token, which has a text and no log-probability.
    """
    if tokens is None:
        return None
    texts = [
        tokenizer.decode([first_token_id]) if likely is None else likely[0]["text"]
        for likely in tokens
    ]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [likely and likely[0]["logprob"] for likely in tokens],
        "top_logprobs": [likely and _by_text(_likeliest(likely, top)) for likely in tokens],
        "text_offset": offsets,
    }


def _by_text(tokens: list[TokenLogprob]) -> dict[str, float]:
    """Log-probabilities by text; of equal texts (parts of characters) the first one counts."""
    by_text: dict[str, float] = {}
    for token in tokens:
        by_text.setdefault(token["text"], token["logprob"])
    return by_text


def _likeliest(likely: list[TokenLogprob], top: int | None) -> list[TokenLogprob]:
    """The `top` most likely tokens, in order; `likely` starts with the sampled one instead."""
    return sorted(likely, key=lambda token: token["rank"])[:top]
