"""/tokenize and /detokenize: texts as token ids, and back."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from nanovllm.async_llm import AsyncLLM
from nanovllm.openai.request import CHAT, parse_body
from nanovllm.server.answering import refuse_templates
from nanovllm.server.bodies import read_object
from nanovllm.server.options import ServerOptions
from nanovllm.utils.checks import check_bool, check_ids, check_int, check_name, check_text, shorten

TEXT_FIELDS = ("model", "prompt", "add_special_tokens", "return_token_strs")
IDS_FIELDS = ("model", "tokens")


class Tokens:
    """The tokenizer of an engine, for clients."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions) -> None:
        self._llm, self._max_body_mib = llm, options.max_body_mib
        self._trusts_templates = options.trust_request_chat_template

    async def tokenize(self, request: Request) -> JSONResponse:
        """The token ids of a `prompt`, or of the prompt of `messages`."""
        body = await read_object(request, self._max_body_mib)
        shows = check_bool("return_token_strs", body.pop("return_token_strs", False))
        if "messages" in body:
            ids = await self._of_chat(body)
        else:
            ids = await asyncio.to_thread(self._of_text, body)
        names = self._llm.tokenizer.convert_ids_to_tokens(ids) if shows else None
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": self._llm.config.max_model_len,
                "tokens": ids,
                "token_strs": names,
            }
        )

    async def detokenize(self, request: Request) -> JSONResponse:
        """The text of `tokens`."""
        body = await read_object(request, self._max_body_mib)
        for name in body:
            check_name(name, IDS_FIELDS)
        last = len(self._llm.tokenizer) - 1
        given = check_ids("tokens", body.get("tokens"))
        ids = [check_int("tokens: a token id", token_id, 0, last) for token_id in given]
        return JSONResponse({"prompt": await asyncio.to_thread(self._llm.tokenizer.decode, ids)})

    async def _of_chat(self, body: Mapping[str, Any]) -> list[int]:
        asked = parse_body(CHAT, body, {})
        if not self._trusts_templates:
            refuse_templates(asked)
        turn = await self._llm.chat_turn(asked.prompts[0], asked.params, **asked.chat_options)
        return list(turn.prompt["prompt_token_ids"])

    def _of_text(self, body: Mapping[str, Any]) -> list[int]:
        for name in body:
            check_name(name, TEXT_FIELDS)
        text = body.get("prompt")
        if not isinstance(text, str):
            raise TypeError(f"prompt must be a text, got {shorten(text)}")
        check_text("prompt", text)
        special = check_bool("add_special_tokens", body.get("add_special_tokens", True))
        ids: list[int] = self._llm.tokenizer.encode(text, add_special_tokens=special)
        return ids
