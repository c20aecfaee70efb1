"""Log-probabilities in the form of OpenAI's API, for chats and for completions.

They are made in steps, token by token: an answer may have hundreds of thousands.
"""

from collections.abc import Callable, Iterable
from typing import Any

from nanovllm.openai.token_bytes import token_bytes
from nanovllm.outputs import TokenLogprob
from nanovllm.utils.slices import Steps

Logprobs = Iterable[list[TokenLogprob] | None]  # None: the first token of a prompt
Pack = Callable[[Any], Any]  # what is kept of the entry of a token, such as its JSON


def as_it_is(value: Any) -> Any:
    """Pack a part of an answer in no way."""
    return value


def prompt_entries(tokens: Logprobs | None, pack: Pack) -> Steps[Any]:
    """The log-probabilities of a prompt, as outputs have them; or None."""
    if tokens is None:
        return None
    entries = []
    for likely in tokens:
        entries.append(likely and pack(likely))
        yield len(likely or ())
    return entries


def chat_logprobs(
    tokens: Logprobs | None, top: int | None, tokenizer: Any, pack: Pack = as_it_is
) -> Steps[Any]:
    """Log-probabilities of a chat's tokens, each with the `top` likeliest ones; or None."""
    if tokens is None:
        return None
    content = []
    for likely in tokens:
        if likely is not None:
            likeliest = [_chat_token(token, tokenizer) for token in _likeliest(likely, top)]
            whole = _chat_token(likely[0], tokenizer) | {"top_logprobs": likeliest}
            content.append(pack(whole))
            yield len(likely)
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
    pack: Pack = as_it_is,
) -> Steps[Any]:
    """The log-probabilities of a completion's tokens. Their text begins at `offset`.

    `first_token_id` is the prompt's first token, which has a text and no log-probability.
    """
    if tokens is None:
        return None
    texts, offsets, logprobs, top_logprobs = [], [], [], []
    for likely in tokens:
        text = tokenizer.decode([first_token_id]) if likely is None else likely[0]["text"]
        texts.append(text)
        offsets.append(offset)
        offset += len(text)
        logprobs.append(likely and likely[0]["logprob"])
        top_logprobs.append(likely and pack(_by_text(_likeliest(likely, top))))
        yield len(likely or ())
    return {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": top_logprobs,
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
