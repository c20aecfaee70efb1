"""A line's way into an engine: its request, checked and queued."""

from collections.abc import Mapping
from typing import Any

from nanovllm.batch.journal import digest_of
from nanovllm.llm import LLM
from nanovllm.openai.request import CHAT, BatchRequest, parse_request


def check_tokenizer(llm: LLM) -> None:
    """Raise where no line could be answered with text."""
    if llm.tokenizer is None:
        raise RuntimeError(f"{llm.config.model} has no tokenizer; --tokenizer names one")


def submit(
    llm: LLM, custom_id: str, line: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[int, BatchRequest]:
    """Queue what `line` asks for; its number in the engine, and the request.

    `defaults` are sampling parameters of lines that do not say. The seed of one that does not say
    hangs on `custom_id`. A bad line is a TypeError or ValueError, and leaves the engine as it was;
    what every line would fail for is a RuntimeError.
    """
    seed = digest_of(custom_id, llm.config.seed) >> 1
    request = parse_request(line, {"seed": seed, **defaults})
    prompt = request.prompt
    if request.url == CHAT:
        if not llm.has_chat_template:
            raise RuntimeError(f"the tokenizer has no chat template for {custom_id!r}")
        (prompt,) = llm.chat_prompts([prompt], **request.template_options)
    return llm.add_request(prompt, request.params), request
