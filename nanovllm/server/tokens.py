"""/tokenize, /detokenize and /tokenizer_info: texts as token ids, and what is special to them."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nanovllm.async_llm import AsyncLLM
from nanovllm.openai.field_kinds import IDS, SWITCH, TEXT, Kind, check_kinds
from nanovllm.openai.fields import given_fields
from nanovllm.openai.long_texts import decoded
from nanovllm.openai.request import CHAT, APIRequest, parse_body
from nanovllm.server.adapters import ServedModels
from nanovllm.server.answered import answered
from nanovllm.server.bodies import Bodies
from nanovllm.server.generation import divided_fields
from nanovllm.server.log import RequestLine
from nanovllm.server.options import ServerOptions
from nanovllm.server.refusals import check_truncated, num_chars, refuse_templates
from nanovllm.utils.checks import check_int, check_text
from nanovllm.utils.list_checks import check_ids

TEXT_FIELDS = ("prompt", "add_special_tokens", "return_token_strs")
IDS_FIELDS = ("tokens",)
KINDS: dict[str, Kind] = {
    "prompt": TEXT, "tokens": IDS, "add_special_tokens": SWITCH, "return_token_strs": SWITCH,
}  # fmt: skip
OF_ANY_LENGTH = {"truncate_prompt_tokens": -1}  # parameters of a chat that the model cannot take
SLICE = 1 << 14  # tokens that are converted at a time, so that other threads run in between


@dataclasses.dataclass(frozen=True)
class TokensRequest:
    """A parsed body of /tokenize: a text, or a chat, to convert."""

    text: str | None
    chat: APIRequest | None
    adds_special: bool
    shows: bool


class TokenAnswering:
    """The tokenizer of an engine, for clients."""

    def __init__(self, llm: AsyncLLM, models: ServedModels, options: ServerOptions) -> None:
        self._llm, self._models, self._options = llm, models, options
        self._bodies = Bodies(llm.readers, options)

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a `prompt`, or of the prompt of `messages`."""
        return await answered(request, self._bodies, self._parse_text, self._tokenized)

    async def detokenize(self, request: Request) -> Response:
        """The text of `tokens`."""
        return await answered(request, self._bodies, self._parse_ids, self._detokenized)

    async def info(self, _: Request) -> Response:
        """The tokenizer's special tokens and its chat template, as vLLM shows them."""
        tokenizer = self._llm.tokenizer
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        found = {name: getattr(tokenizer, name, None) for name in names}
        return JSONResponse({"tokenizer_class": type(tokenizer).__name__, **found})

    def _parse_text(self, _: str, body: dict[str, Any]) -> TokensRequest:
        shows = body.pop("return_token_strs", None)
        shows = False if shows is None else shows
        check_kinds({"return_token_strs": shows}, KINDS)
        if body.get("messages") is not None:
            return TokensRequest(None, self._parse_chat(body), False, shows)
        body = self._given(body, TEXT_FIELDS)
        if "prompt" not in body:
            raise ValueError("prompt or messages is missing")
        text = body["prompt"]
        check_text("prompt", text)
        self._check_length("prompt", text)
        return TokensRequest(text, None, body.get("add_special_tokens", True), shows)

    def _parse_chat(self, body: Mapping[str, Any]) -> APIRequest:
        self._check_length("messages and tools", [body["messages"], body.get("tools")])
        asked = parse_body(CHAT, body, OF_ANY_LENGTH)
        self._models.adapter(asked.model)
        if not self._options.trust_request_chat_template:
            refuse_templates(asked)
        check_truncated(asked.prompts, asked.params.truncate_prompt_tokens, self._options)
        return asked

    def _check_length(self, name: str, value: Any) -> None:
        """Raise if the texts in a value have too many characters."""
        most, number = self._options.max_tokenize_chars, num_chars(value)
        if number > most:
            raise ValueError(
                f"{name} must have at most {most} characters (max_tokenize_chars), got {number}"
            )

    def _parse_ids(self, _: str, body: dict[str, Any]) -> tuple[int, ...]:
        body = self._given(body, IDS_FIELDS)
        if "tokens" not in body:
            raise ValueError("tokens is missing")
        ids = check_ids("tokens", body["tokens"])
        num_ids = max(len(self._llm.tokenizer), self._llm.model_config.vocab_size)
        check_int("tokens: a token id", max(ids, default=0), 0, num_ids - 1)
        return ids

    def _given(self, body: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
        """The fields of a body. Its model must be one of the server's."""
        given = given_fields(body, names)
        check_kinds(given, KINDS)
        self._models.adapter(given.get("model"))
        return given

    async def _tokenized(self, line: RequestLine, asked: TokensRequest) -> dict[str, Any]:
        line.rename(None if asked.chat is None else asked.chat.name)
        if (chat := asked.chat) is None:
            assert asked.text is not None
            answer = functools.partial(self._of_text, asked.text, asked)
            return await self._llm.readers.run(answer, len(asked.text))
        fields, unread = divided_fields(self._llm, self._options, chat.chat_options)
        turn = await self._llm.chat_turn(chat.prompts[0], chat.params, **fields)
        ids = list(turn.prompt["prompt_token_ids"])
        found = await self._llm.readers.run(lambda: self._answer(ids, asked.shows), len(ids))
        return {**found, "fields_without_effect": unread} if unread else found

    def _of_text(self, text: str, asked: TokensRequest) -> dict[str, Any]:
        encode = self._llm.tokenizer.encode
        ids = encode(text, add_special_tokens=asked.adds_special, verbose=False)
        return self._answer(ids, asked.shows)

    def _answer(self, ids: list[int], shows: bool) -> dict[str, Any]:
        return {
            "count": len(ids),
            "max_model_len": self._llm.config.max_model_len,
            "tokens": _json_list(ids),
            "token_strs": _json_list(ids, self._llm.tokenizer.convert_ids_to_tokens)
            if shows
            else None,
        }

    async def _detokenized(self, _: RequestLine, ids: tuple[int, ...]) -> dict[str, Any]:
        text = await self._llm.readers.run(lambda: decoded(self._llm.tokenizer, ids), len(ids))
        return {"prompt": text}


def _json_list(
    ids: list[int], convert: Callable[[list[int]], list[Any]] = lambda part: part
) -> orjson.Fragment:
    """A list as JSON of what `convert` makes of the ids, a slice at a time."""
    parts = (orjson.dumps(convert(ids[i : i + SLICE])) for i in range(0, len(ids), SLICE))
    return orjson.Fragment(b"[" + b",".join(part[1:-1] for part in parts) + b"]")
