"""Server: requests to the server that are not measured, and the bytes of the measured ones."""

import json
from collections.abc import Mapping
from typing import Any

from nanovllm.bench.serve.answer import AnswerError, error_text
from nanovllm.bench.serve.client import Body, Client
from nanovllm.bench.serve.options import PATHS, ServerLoad
from nanovllm.bench.serve.prompts import WORDS, Vocabulary


class Server:
    """A server with OpenAI's API, and how requests to it are written."""

    def __init__(self, client: Client, load: ServerLoad, extra_body: Mapping[str, Any]) -> None:
        self.client, self.model = client, ""
        self._load, self._extra_body = load, extra_body

    async def choose_model(self, model: str | None) -> None:
        """Use this model, or the first one of the server's list."""
        if model is None:
            listed = await self.ask("GET", "/v1/models")
            try:
                model = listed["data"][0]["id"]
            except (KeyError, IndexError, TypeError):
                raise AnswerError(
                    f"{self.client.address}/v1/models has no model; give --model"
                ) from None
        self.model = str(model)

    async def vocabulary(self) -> Vocabulary:
        """The vocabulary of random prompts: ids of this server's tokenizer, if it shows them."""
        if self._load.vocab_size is not None:
            return Vocabulary(range(self._load.vocab_size))
        text = " ".join(WORDS)
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            tokens = (await self.ask("POST", "/tokenize", body))["tokens"]
            ids = sorted({int(token) for token in tokens})
        except (AnswerError, KeyError, TypeError, ValueError):
            return Vocabulary()
        return Vocabulary(ids, max(len(tokens), 1) / len(WORDS))

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of an answer that is not a stream; AnswerError if the server refuses."""
        data = None if body is None else json.dumps(body).encode()
        answer = Body()
        head = await self.client.send(self.client.request(method, path, data), answer)
        if head.status != 200:
            raise AnswerError(f"{path}: {head.status} {head.reason}: {error_text(answer.data)}")
        try:
            return json.loads(answer.data)
        except ValueError:
            raise AnswerError(
                f"{path}: the answer is not JSON: {error_text(answer.data)}"
            ) from None

    def request(self, fields: Mapping[str, Any]) -> bytes:
        """The bytes of a measured request; a null in the extra body removes a field."""
        load = self._load
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": load.temperature,
            "ignore_eos": load.ignore_eos or None,
            **fields,
            **self._extra_body,
        }
        kept = {name: value for name, value in body.items() if value is not None}
        return self.client.request("POST", PATHS[load.endpoint], json.dumps(kept).encode())
