"""ServerOptions: the options of `nanovllm serve` in addition to those of the engine."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.server.limits import Limits
from nanovllm.utils.list_checks import check_texts
from nanovllm.utils.option import (
    NOTHING,
    SOME_TEXT,
    TRUE_OR_FALSE,
    Rule,
    by_name,
    check_options,
    float_range,
    int_range,
    option,
)

if TYPE_CHECKING:
    from nanovllm.utils.other_names import OtherName

KEY = "NANOVLLM_API_KEY"
ORIGIN = re.compile(r"\*|https?://[^/\s]+")  # as browsers send it
HOST = re.compile(r"\*|[^\s/:@*\[\]]+|\[[0-9a-fA-F:.]+\]")  # without a port


def _check_origins(name: str, value: Any) -> tuple[str, ...]:
    origins = check_texts(name, value)
    for origin in origins:
        if not ORIGIN.fullmatch(origin):
            raise ValueError(f"{name} must be * or like https://example.com, got {origin!r}")
    return origins


def _check_hosts(name: str, value: Any) -> tuple[str, ...]:
    hosts = check_texts(name, value)
    for host in hosts:
        if not HOST.fullmatch(host):
            raise ValueError(f"{name} must be * or a name like example.com, got {host!r}")
    return tuple(host.lower().rstrip(".") for host in hosts)


def _check_names(name: str, value: Any) -> tuple[str, ...]:
    names = check_texts(name, value)
    for place, one in enumerate(names):
        if one in names[:place]:
            raise ValueError(f"{name} must have different names, got {one!r} twice")
    return names


class Keys(tuple[str, ...]):
    """API keys, which no text about them shows."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{len(self)} key{'s' * (len(self) != 1)}>"


def _check_keys(name: str, value: Any) -> Keys:
    """Keys that a header can have; the error does not show them."""
    is_list = isinstance(value, Iterable) and not isinstance(value, str | Mapping)
    keys = tuple(value) if is_list else (None,)
    if not all(map(_is_key, keys)):
        raise ValueError(f"{name} must be {KEYS.allowed}")
    return Keys(keys)


def _is_key(value: Any) -> bool:
    return isinstance(value, str) and value == value.strip() != "" and value.isprintable()


def _check_root(name: str, value: Any) -> str:
    path: str = SOME_TEXT.check(name, value)
    if not path.startswith("/") or path.endswith("/"):
        raise ValueError(f"{name} must be like /path, got {path!r}")
    return path


ROOT = Rule(_check_root, "a text like /path")
KEYS = Rule(_check_keys, "a list of printable texts without white space around them")
NAMES = Rule(_check_names, "a list of different texts")
ORIGINS = Rule(_check_origins, "* or a list like https://example.com")
HOSTS = Rule(_check_hosts, "* or a list like example.com")


def _other_names() -> "Mapping[str, OtherName]":
    from nanovllm.from_vllm.names.server import SERVER

    return SERVER


@by_name("server option", _other_names)
@dataclass(frozen=True, kw_only=True)
class ServerOptions(Limits):
    """Options of the server, and its limits; docs/serving.md explains them."""

    host: str = option("127.0.0.1", "address to listen at; `0.0.0.0` is all of IPv4", SOME_TEXT)
    port: int = option(8000, "port to listen at; 0 is a free one", int_range(0, 65535))
    uds: str | None = option(
        None, "path of a Unix socket to listen at, instead of an address", SOME_TEXT, none=NOTHING
    )
    served_model_name: Iterable[str] | None = option(
        None, "names of the model in requests and responses", NAMES, none="the model's own"
    )
    api_key: Iterable[str] | None = option(
        None,
        "API keys: a request must have one of them; NANOVLLM_API_KEY adds one",
        KEYS,
        none=NOTHING,
    )
    drain_seconds: float = option(
        30.0, "how long running requests may go on after SIGTERM", float_range(0.0)
    )
    health_seconds: float = option(
        30.0,
        "how long the engine may take to answer `/health`; it answers between steps",
        float_range(0.0, above=True),
    )
    cors_origin: Iterable[str] | None = option(
        None, "web sites with pages that may use the server; `*` is all", ORIGINS, none=NOTHING
    )
    allowed_host: Iterable[str] | None = option(
        None,
        "host names that clients may use; `*` is all. Names of the loopback address always may",
        HOSTS,
        none="all, but no others at a loopback address without keys",
    )
    trust_request_chat_template: bool = option(
        False,
        "let requests bring a chat template of their own: a program, which may never end",
        TRUE_OR_FALSE,
    )
    allow_unread_fields: bool = option(
        False,
        "let chats have a `reasoning_effort`, `thinking` or `documents` that the chat template does"
        " not read; each answer lists such fields in `fields_without_effect`",
        TRUE_OR_FALSE,
    )
    allow_priority: bool = option(
        False,
        "let requests have a `priority`; one that is always sooner can keep others from running",
        TRUE_OR_FALSE,
    )
    allow_lora_updates: bool = option(
        False,
        "let clients load and unload adapters; they name directories of the server",
        TRUE_OR_FALSE,
    )
    sleep_endpoints: bool = option(
        False,
        "let clients free the engine's memory with `/sleep`, which needs `enable_sleep_mode`, and"
        " empty its prefix cache",
        TRUE_OR_FALSE,
    )
    root_path: str | None = option(None, "path that a proxy in front removes", ROOT, none=NOTHING)
    ssl_certfile: str | None = option(None, "certificate for TLS", SOME_TEXT, none=NOTHING)
    ssl_keyfile: str | None = option(None, "key of the certificate", SOME_TEXT, none=NOTHING)

    def __post_init__(self) -> None:
        check_options(self)
        usual = ServerOptions.host, ServerOptions.port
        if self.uds is not None and (self.host, self.port) != usual:
            raise ValueError(
                "uds cannot be given with a host or a port, which it replaces; got"
                f" host={self.host!r}, port={self.port}"
            )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile needs ssl_certfile")


def with_key(options: ServerOptions) -> ServerOptions:
    """The options with the key of the environment, without the newline of a file, if it is set."""
    if (key := os.environ.get(KEY)) is None:
        return options
    if not _is_key(key.strip()):
        raise ValueError(f"the environment variable {KEY} must be a printable text")
    return replace(options, api_key=[*(options.api_key or ()), key.strip()])
