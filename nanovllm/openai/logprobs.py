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


def named_by_ids(tokens: Logprobs | None) -> Logprobs | None:
    """The same with "token_id:5" as the text of a token."""
    if tokens is None:
        return None
    return (likely and [_named(token) for token in likely] for likely in tokens)


def _named(token: TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        token_id=token["token_id"],
        text=id_name(token["token_id"]),
        logprob=token["logprob"],
        rank=token["rank"],
    )


def id_name(token_id: int) -> str:
    """A token's id as the text that stands for the token."""
    return f"token_id:{token_id}"


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
    tokens: Logprobs | None,
    top: int | None,
    tokenizer: Any,
    pack: Pack = as_it_is,
    by_id: bool = False,
) -> Steps[Any]:
    """Log-probabilities of a chat's tokens, each with the `top` likeliest ones; or None.

    With `by_id`, ids stand for the texts of tokens.
    """
    if tokens is None:
        return None
    content = []
    for likely in (named_by_ids(tokens) or ()) if by_id else tokens:
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
    by_id: bool = False,
) -> Steps[Any]:
    """The log-probabilities of a completion's tokens. Their text begins at `offset`.

    `first_token_id` is the prompt's first token, which has a text and no log-probability. With
    `by_id`, ids stand for the texts of tokens.
    """
    if tokens is None:
        return None
    texts, offsets, logprobs, top_logprobs = [], [], [], []
    first_text = id_name if by_id else lambda token_id: tokenizer.decode([token_id])
    for likely in (named_by_ids(tokens) or ()) if by_id else tokens:
        text = first_text(first_token_id) if likely is None else likely[0]["text"]
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
