"""An HTTP server on many machines and GPUs, through Ray Serve.

    serve.run(serving_app("Qwen/Qwen3-8B", num_replicas=8))

A replica is an engine with the application of `nanovllm serve`, in a process that Ray starts. Ray's
proxies listen, and pass each request on to a replica. Ray replaces a replica that has died.
"""

import asyncio
import inspect
import logging
import os
from collections.abc import Mapping
from typing import Any

try:
    from ray import serve
    from ray.serve.config import AutoscalingConfig
    from starlette.types import ASGIApp
except ImportError as error:
    hint = "pip install 'nanovllm[ray-serve]'"
    raise ImportError(f"nanovllm.ray needs nanovllm[ray-serve]: {error}; {hint}") from error

from nanovllm.config import Config
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.option_names import option_name
from nanovllm.ray.placement import check_gpus, is_on_cuda
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.app import make_app
from nanovllm.server.options import ServerOptions, with_key
from nanovllm.server.serve import default_params, open_engine
from nanovllm.utils.checks import check_float, check_name, did_you_mean, shorten
from nanovllm.utils.json_text import parse_json
from nanovllm.utils.option import options_of

logger = logging.getLogger("nanovllm.server")

# Options of `nanovllm serve` that belong to Ray's proxies, and what to use instead.
OF_PROXIES = {
    **dict.fromkeys(
        ("host", "port", "ssl_certfile", "ssl_keyfile"), "serve.start(http_options={...}) sets it"
    ),
    "root_path": "serve.run(..., route_prefix=...) replaces it",
    "uds": "they listen at no Unix sockets",
    **dict.fromkeys(
        ("max_connections", "max_header_kib", "max_headers", "request_seconds", "unread_seconds"),
        "they have limits of their own for connections",
    ),
}
OF_DEPLOYMENTS = tuple(
    name
    for name in inspect.signature(serve.deployment).parameters
    if name not in ("_func_or_class", "version", "user_config")
)
ANYWHERE = "0.0.0.0"  # where proxies listen is not known here
UNLIMITED = 1_000_000_000  # requests at a replica; its engine counts them, and says when it is full
CLOSE_SECONDS = 10.0  # for an engine to end
LAST_SECONDS = 0.5  # the time to send responses when the engine has ended


class ServerReplica:
    """An engine and its HTTP application; Ray Serve calls its methods."""

    def __init__(
        self, engine: Mapping[str, Any], server: ServerOptions, sampling: Mapping[str, Any]
    ) -> None:
        _log_as_ray_does()
        self._options, self._sampling = server, sampling
        self._watch: asyncio.Task[None] | None = None
        self._llm = open_engine(engine, server)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application that Ray passes requests to."""
        await self._llm.stats()  # from here on the engine's end is noticed
        self._watch = asyncio.create_task(self._end_with_engine())
        app, _ = make_app(self._llm, self._options, default_params(self._llm, self._sampling))
        return app

    async def check_health(self) -> None:
        """Raise if the engine has ended, or does not answer: Ray then replaces the replica."""
        await self._llm.ping(self._options.health_seconds)

    def __del__(self) -> None:
        """End the engine; Ray calls it when the last request has been answered."""
        if self._watch is not None:
            self._watch.cancel()
        if hasattr(self, "_llm"):  # else it has not been loaded
            self._llm.close()

    async def _end_with_engine(self) -> None:
        """End the process soon after its engine; Ray would keep sending requests to it."""
        error = await self._llm.wait_for_failure()
        logger.error("the engine has ended: %s", str(error).split("\n")[0])
        await asyncio.sleep(LAST_SECONDS)
        os._exit(1)  # this event loop is not the process's main one


def serving_app(model: str = EMBEDDED_MODEL, **options: Any) -> "serve.Application":
    """An application for `serve.run`: replicas of an engine behind one address.

    Options are those of `nanovllm serve` by their names there (the engine's seed is `engine_seed`),
    and those of `serve.deployment`, such as `num_replicas` or `autoscaling_config`. They are
    checked here; replicas load the model. A replica asks for `tensor_parallel_size` GPUs of one
    machine if the cluster has any, and otherwise for as many cores; `ray_actor_options` changes
    that.
    """
    given = _by_owner(options)
    config = Config(model=model, **given["engine"])
    server = with_key(ServerOptions(host=ANYWHERE, **given["server"]))
    SamplingParams(**given["sampling"])
    actor, device = _actor_options(config, given["deployment"].get("ray_actor_options"))
    deployment = serve.deployment(
        **{
            "name": "nanovllm",
            "max_ongoing_requests": UNLIMITED,
            "graceful_shutdown_timeout_s": server.drain_seconds + CLOSE_SECONDS,
            "health_check_timeout_s": server.health_seconds + CLOSE_SECONDS,
            **given["deployment"],
            "ray_actor_options": actor,
        }
    )
    return deployment(serve.ingress()(ServerReplica)).bind(
        engine={**given["engine"], "model": config.model, "device": device},
        server=server,
        sampling=given["sampling"],
    )


def build(args: Mapping[str, Any]) -> "serve.Application":
    """`serving_app` for `serve run nanovllm.ray:build model=Qwen/Qwen3-8B num_replicas=8`.

    Values are read as JSON, `autoscaling_config='{"max_replicas": 8}'`, or as texts if they are
    not JSON. In Ray's YAML files `args` have their types already.
    """
    return serving_app(**{name: _value(value) for name, value in args.items()})


def _by_owner(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The options of the engine, the server, sampling and the deployment, by their own names."""
    owners = {
        option_name(kind, name): (owner, name)
        for owner, kind in (("engine", Config), ("server", ServerOptions),
                            ("sampling", SamplingParams))
        for name in options_of(kind)
    }  # fmt: skip
    owners |= {name: ("deployment", name) for name in OF_DEPLOYMENTS}
    given: dict[str, dict[str, Any]] = {owner: {} for owner, _ in owners.values()}
    for name, value in options.items():
        if name not in owners:
            raise TypeError(f"unknown option {name!r}{did_you_mean(name, owners)}")
        if name in OF_PROXIES:
            raise ValueError(f"{name} is an option of Ray's proxies: {OF_PROXIES[name]}")
        owner, own_name = owners[name]
        given[owner][own_name] = value
    _check_autoscaling(given["deployment"].get("autoscaling_config"))
    return given


def _check_autoscaling(config: Any) -> None:
    """Raise for an unknown name: Ray would ignore it."""
    if isinstance(config, Mapping):
        for name in config:
            check_name(name, AutoscalingConfig.model_fields, "autoscaling_config: ")


def _actor_options(config: Config, given: Any) -> tuple[dict[str, Any], str]:
    """The resources that Ray reserves for a replica, and the device of its engine."""
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"ray_actor_options must be a dict, got {shorten(given)}")
    options, ranks = dict(given or {}), config.tensor_parallel_size
    if config.device == "auto" and "num_gpus" in options:
        on_cuda = check_float("num_gpus", options["num_gpus"], 0.0) > 0
    else:
        on_cuda = is_on_cuda(config)
    options.setdefault("num_gpus", ranks if on_cuda else 0)
    options.setdefault("num_cpus", 1 if on_cuda else ranks)
    check_gpus(config, on_cuda, options["num_gpus"])
    return options, "cuda" if on_cuda else "cpu"


def _value(text: Any) -> Any:
    """The value of an argument of `serve run`."""
    try:
        return parse_json(text) if isinstance(text, str) else text
    except ValueError:
        return text


def _log_as_ray_does() -> None:
    """Write the line of each request, and warnings, to the log of the replica."""
    ours = logging.getLogger("nanovllm")
    for handler in logging.getLogger("ray.serve").handlers:
        ours.addHandler(handler)
    logger.setLevel(logging.INFO)
