"""The adapters that a server offers by name: those it starts with, and those that clients load."""

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from nanovllm.async_llm import AsyncLLM
from nanovllm.lora_request import LoRARequest, named_adapters
from nanovllm.openai.field_kinds import AS_TEXT, SWITCH, Kind, check_kinds
from nanovllm.server.bodies import Bodies
from nanovllm.server.errors import APIError
from nanovllm.server.options import ServerOptions
from nanovllm.utils.checks import check_name, shorten
from nanovllm.utils.json_text import shorten_json

LOAD_FIELDS = ("lora_name", "lora_path", "load_inplace")
UNLOAD_FIELDS = ("lora_name", "lora_int_id")
KINDS: dict[str, Kind] = {"lora_name": AS_TEXT, "lora_path": AS_TEXT, "load_inplace": SWITCH}


class ServedModels:
    """The names that a body's `model` may have: the model's own `names`, and those of adapters."""

    def __init__(self, llm: AsyncLLM, names: Sequence[str], options: ServerOptions) -> None:
        self._llm, self.names, self._options = llm, tuple(names), options
        self._bodies, self._created = Bodies(llm.readers, options), int(time.time())
        self._adapters = named_adapters(llm.config.lora_modules)
        if taken := [name for name in self.names if name in self._adapters]:
            raise ValueError(f"lora_modules must not have the model's own name, got {taken[0]!r}")

    def adapter(self, name: str | None) -> LoRARequest | None:
        """The adapter of this name; None for the model itself, an error for other names."""
        if name is None or name in self.names:
            return None
        if name not in self._adapters:
            known = ", ".join([*self.names, *self._adapters])
            raise APIError(
                404, f"model {shorten(name)} does not exist; this server has: {known}",
                "model_not_found",
            )  # fmt: skip
        return self._adapters[name]

    def answering(self, name: str | None) -> str:
        """The name in answers to requests for `name`: the model's first one, or an adapter's.

        An unknown name is an error.
        """
        adapter = self.adapter(name)
        return self.names[0] if adapter is None else adapter.name

    def descriptions(self) -> list[dict[str, Any]]:
        """The descriptions of the model, by each of its names, and of all adapters."""
        return [self.description(name) for name in (*self.names, *self._adapters)]

    def description(self, name: str) -> dict[str, Any]:
        """The description of a model."""
        adapter = self.adapter(name)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "nanovllm",
            "root": adapter.lora_path if adapter else self._llm.config.model,
            "parent": self.names[0] if adapter else None,
            "max_model_len": self._llm.config.max_model_len,
        }

    async def load(self, request: Request) -> Response:
        """Check an adapter in a directory on the server, and offer it by a name."""
        body = await self._body(request, LOAD_FIELDS)
        path = _text(body, "lora_path")
        adapter = LoRARequest(_text(body, "lora_name"), path)
        replaces = body.get("load_inplace", False)
        self._check_free(adapter.name, replaces)
        await self._llm.check_adapter(adapter)
        self._check_free(adapter.name, replaces)
        self._adapters[adapter.name] = adapter
        return PlainTextResponse(f"the adapter {adapter.name!r} is loaded")

    async def unload(self, request: Request) -> Response:
        """Stop offering an adapter. Requests that use it go on."""
        body = await self._body(request, UNLOAD_FIELDS)
        name = _text(body, "lora_name")
        if name not in self._adapters:
            raise APIError(404, f"there is no adapter {name!r}", "model_not_found")
        del self._adapters[name]
        return PlainTextResponse(f"the adapter {name!r} is unloaded")

    async def _body(self, request: Request, fields: Sequence[str]) -> dict[str, Any]:
        if not self._options.allow_lora_updates:
            raise APIError(
                403, "clients may not load and unload adapters here (--allow-lora-updates)"
            )
        body = await self._bodies.read(request, lambda body: body)
        for name in body:
            check_name(name, fields)
        check_kinds(body, KINDS)
        return body

    def _check_free(self, name: str, replaces: bool = False) -> None:
        if name in self.names:
            raise APIError(400, f"lora_name must not be the model's own name, got {name!r}")
        if name in self._adapters and not replaces:
            raise APIError(
                400, f"lora_name {name!r} is that of a loaded adapter; load_inplace replaces it"
            )


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise TypeError(f"{name} must be a text that is not empty, got {shorten_json(value)}")
    return value
