"""LoRARequest: which adapter a request uses. The engine reads the adapter's files."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.utils.checks import check_int, did_you_mean, shorten
from nanovllm.utils.list_checks import check_texts
from nanovllm.utils.option import SOME_TEXT

UNUSED = {  # vLLM's other fields
    "base_model_name": "an adapter is for the engine's model",
    "tensorizer_config_dict": "adapters are read from PEFT's files",
}
NAMES = ("lora_name", "lora_int_id", "lora_path", "lora_local_path", *UNUSED)


@dataclass(frozen=True, init=False)
class LoRARequest:
    """An adapter: `LoRARequest("name", path)`.

    `path` is a local directory in PEFT's format. vLLM's form with a number works too:
    `LoRARequest("name", 1, path)`, with the keywords `lora_name`, `lora_int_id` and `lora_path`.
    vLLM's `lora_local_path` is another name of the path; its `base_model_name` must be None.
    The files alone identify the adapter: name and number are the caller's labels.
    """

    lora_name: str
    lora_path: str
    lora_int_id: int | None

    def __init__(
        self,
        lora_name: str,
        *number_and_path: Any,
        lora_int_id: int | None = None,
        lora_path: str | os.PathLike[str] | None = None,
        lora_local_path: str | os.PathLike[str] | None = None,
        **others: Any,
    ) -> None:
        for name, value in others.items():
            if name not in UNUSED:
                raise TypeError(f"LoRARequest: unknown field {name!r}{did_you_mean(name, NAMES)}")
            if value is not None:
                raise ValueError(f"{name} must be None, got {shorten(value)}: {UNUSED[name]}")
        if lora_local_path is not None:
            if lora_path is not None:
                raise ValueError("lora_local_path is another name of lora_path; give one of them")
            lora_path = lora_local_path
        given = [*number_and_path]
        if given and lora_path is None:
            lora_path = given.pop()
        if given and lora_int_id is None:
            lora_int_id = given.pop()
        if given:
            raise TypeError(
                "LoRARequest takes a name and a path, or a name, a number and a path, got"
                f" {shorten((lora_name, *number_and_path))}"
            )
        SOME_TEXT.check("lora_name", lora_name)
        if not isinstance(lora_path, str | os.PathLike) or not os.fspath(lora_path):
            raise TypeError(f"lora_path must be a directory, got {shorten(lora_path)}")
        if lora_int_id is not None:
            check_int("lora_int_id", lora_int_id, 1)
        object.__setattr__(self, "lora_name", lora_name)
        object.__setattr__(self, "lora_path", str(os.fspath(lora_path)))
        object.__setattr__(self, "lora_int_id", lora_int_id)

    @property
    def name(self) -> str:
        """The adapter's name; vLLM's other name of `lora_name`."""
        return self.lora_name

    @property
    def path(self) -> str:
        """The adapter's directory; vLLM's other name of `lora_path`."""
        return self.lora_path

    @property
    def adapter_id(self) -> int | None:
        """The caller's number; vLLM's other name of `lora_int_id`."""
        return self.lora_int_id


NOT_ENABLED = (
    "lora_request needs enable_lora=True (--enable-lora) when the engine is made, got an engine"
    " without it"
)
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None  # for one or several prompts


def check_lora_request(value: Any) -> LoRARequest | None:
    """Return the value if it is an adapter or None; raise otherwise."""
    if value is not None and not isinstance(value, LoRARequest):
        raise TypeError(f"lora_request must be a LoRARequest or None, got {shorten(value)}")
    return value


def check_option(name: str, value: Any, _: str) -> tuple[str, ...]:
    """Return the texts NAME=PATH of an option; raise for others."""
    modules = check_texts(name, value)
    named_adapters(modules)
    return modules


def named_adapters(modules: Iterable[str]) -> dict[str, LoRARequest]:
    """The adapters of texts NAME=PATH, by name."""
    named: dict[str, LoRARequest] = {}
    for module in modules:
        name, _, path = module.partition("=")
        if not name or not path:
            raise ValueError(f"lora_modules must be like NAME=PATH, got {module!r}")
        if name in named:
            raise ValueError(f"lora_modules must have different names, got {name!r} twice")
        named[name] = LoRARequest(name, path)
    return named


def lora_requests(given: Any, num_prompts: int) -> list[LoRARequest | None]:
    """One adapter or None for each prompt; `given` is one for all, or a list."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        return [check_lora_request(given)] * num_prompts
    if len(given) != num_prompts:
        raise ValueError(
            f"lora_request must be one or as many as prompts ({num_prompts}), got {len(given)}"
        )
    return [check_lora_request(one) for one in given]


def read_once(
    read: Callable[[LoRARequest], Any],
    lora_request: LoRARequest,
    known: dict[LoRARequest, Any] | None,
) -> Any:
    """The adapter of a request, checked, and read unless it is `known`, where it is then kept."""
    check_lora_request(lora_request)
    known = {} if known is None else known
    if lora_request not in known:
        known[lora_request] = read(lora_request)
    return known[lora_request]
