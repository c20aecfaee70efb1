"""Check a line's request and queue it in an engine."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm.batch.digests import digest_of
from nanovllm.batch.envelope import parse_request
from nanovllm.llm import LLM
from nanovllm.openai.request import CHAT, APIRequest


def check_tokenizer(llm: LLM) -> None:
    """Raise if the model has no tokenizer: no line could be answered with text."""
    if llm.tokenizer is None:
        raise RuntimeError(f"{llm.config.model} has no tokenizer; --tokenizer names one")


def submit(
    llm: LLM, custom_id: str, line: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[int, APIRequest]:
    """Queue a line's request; return the request's id in the engine, and the request.

    `defaults` are sampling parameters for lines without them. A line without a seed gets one that
    depends on `custom_id`. A bad line is a TypeError or ValueError and changes nothing in the
    engine; what would make every line fail is a RuntimeError.
    """
    seed = digest_of(custom_id, llm.config.seed) >> 1
    request = parse_request(line, {"seed": seed, **defaults})
    (prompt,) = request.prompts
    if request.url == CHAT:
        if not llm.has_chat_template:
            raise RuntimeError(f"the tokenizer has no chat template for {custom_id!r}")
        (turn,) = llm.chat_turns([prompt], request.params, **request.chat_options)
        prompt = turn.prompt
        request = replace(request, params=turn.params, answer=turn.answer)
    return llm.add_request(prompt, request.params, llm.named_adapter(request.model)), request
