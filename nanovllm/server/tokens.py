"""/tokenize and /detokenize: convert texts to token ids, and back."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from nanovllm.async_llm import AsyncLLM
from nanovllm.openai.request import CHAT, given_fields, parse_body
from nanovllm.server.adapters import ServedModels
from nanovllm.server.answering import json_response, refuse_templates
from nanovllm.server.bodies import read_object
from nanovllm.server.options import ServerOptions
from nanovllm.utils.checks import check_ids, check_int, check_text
from nanovllm.utils.json_text import check_json_bool, shorten_json

TEXT_FIELDS = ("prompt", "add_special_tokens")
IDS_FIELDS = ("tokens",)


class TokenAnswering:
    """The tokenizer of an engine, for clients."""

    def __init__(self, llm: AsyncLLM, models: ServedModels, options: ServerOptions) -> None:
        self._llm, self._models, self._max_body_mib = llm, models, options.max_body_mib
        self._trusts_templates = options.trust_request_chat_template

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a `prompt`, or of the prompt of `messages`."""
        body = await read_object(request, self._max_body_mib)
        shows = body.pop("return_token_strs", None)
        shows = shows is not None and check_json_bool("return_token_strs", shows)
        if body.get("messages") is not None:
            ids = await self._of_chat(body)
        else:
            ids = await asyncio.to_thread(self._of_text, self._given(body, TEXT_FIELDS))
        names = self._llm.tokenizer.convert_ids_to_tokens(ids) if shows else None
        return json_response(
            {
                "count": len(ids),
                "max_model_len": self._llm.config.max_model_len,
                "tokens": ids,
                "token_strs": names,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of `tokens`."""
        body = self._given(await read_object(request, self._max_body_mib), IDS_FIELDS)
        if "tokens" not in body:
            raise ValueError("tokens is missing")
        ids = check_ids("tokens", body["tokens"])
        num_ids = max(len(self._llm.tokenizer), self._llm.model_config.vocab_size)
        check_int("tokens: a token id", max(ids, default=0), 0, num_ids - 1)
        return json_response({"prompt": await asyncio.to_thread(self._llm.tokenizer.decode, ids)})

    def _given(self, body: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
        """The fields of a body. Its model must be one of the server's."""
        given = given_fields(body, names)
        self._models.adapter(given.get("model"))
        return given

    async def _of_chat(self, body: Mapping[str, Any]) -> list[int]:
        asked = parse_body(CHAT, body, {})
        self._models.adapter(asked.model)
        if not self._trusts_templates:
            refuse_templates(asked)
        turn = await self._llm.chat_turn(asked.prompts[0], asked.params, **asked.chat_options)
        return list(turn.prompt["prompt_token_ids"])

    def _of_text(self, body: Mapping[str, Any]) -> list[int]:
        if "prompt" not in body:
            raise ValueError("prompt or messages is missing")
        text = body["prompt"]
        if not isinstance(text, str):
            raise TypeError(f"prompt must be a text, got {shorten_json(text)}")
        check_text("prompt", text)
        special = check_json_bool("add_special_tokens", body.get("add_special_tokens", True))
        ids: list[int] = self._llm.tokenizer.encode(text, add_special_tokens=special)
        return ids
