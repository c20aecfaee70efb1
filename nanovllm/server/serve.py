"""The life of a server: start, serve, drain on a signal, end."""

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanovllm.async_llm import AsyncLLM
from nanovllm.config import Config
from nanovllm.engine.requests.tokenizer import has_tokenizer
from nanovllm.models.checkpoint import resolve_model
from nanovllm.models.generation_config import recommended_fields
from nanovllm.openai.request import CHAT, COMPLETIONS
from nanovllm.option_pairs import log_unused
from nanovllm.server.app import make_app
from nanovllm.server.errors import APIError
from nanovllm.server.http_server import BACKLOG, HTTPServer
from nanovllm.server.options import ServerOptions
from nanovllm.utils.open_files import allow_open_files
from nanovllm.utils.resources import keep_what_lives
from nanovllm.utils.threads import serve_many_threads

logger = logging.getLogger("nanovllm.server")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
CHECK_SECONDS = 0.05  # between checks for requests that still run
LAST_SECONDS = 1.0  # the time to send responses when the engine has ended
SPARE_FILES = 512  # files in addition to connections; those that are refused are open for a moment
MAX_TOKENS = {CHAT: None, COMPLETIONS: 16}  # of bodies that do not set it, as in OpenAI's API


def serve(
    engine: Mapping[str, Any],
    options: ServerOptions,
    sampling: Mapping[str, Any],
    announce: Callable[[str], None],
) -> int:
    """Serve until a signal or the engine's end; returns the process's status.

    `engine` has the options of an AsyncLLM, and `sampling` parameters for bodies without them.
    `announce` gets the address.
    """
    _check_certificate(options)
    options = with_open_files(options)
    with _listening(options) as listener:  # before the model is loaded, which takes long
        llm = open_engine(engine, options)
        keep_what_lives()
        serve_many_threads()
        try:
            return _run(_Life(llm, options, sampling).run(listener, announce))
        finally:
            llm.close()


def with_open_files(options: ServerOptions) -> ServerOptions:
    """The options with as many connections as this process may have open files for."""
    allowed = allow_open_files(options.max_connections + SPARE_FILES) - SPARE_FILES
    if allowed >= options.max_connections:
        return options
    most = max(allowed, 1)
    logger.warning(
        "at most %d connections are open at a time, not %d (max_connections): the system allows"
        " this process %d files (ulimit -n)", most, options.max_connections, allowed + SPARE_FILES
    )  # fmt: skip
    return replace(options, max_connections=most)


def open_engine(engine: Mapping[str, Any], options: ServerOptions) -> AsyncLLM:
    """The engine of a server; a ValueError, before it is loaded, if there is no tokenizer."""
    asked = Config(**engine)
    if options.allow_lora_updates and not asked.enable_lora:
        raise ValueError("allow_lora_updates needs enable_lora=True (--enable-lora), got False")
    if options.allow_priority and asked.scheduling_policy == "fcfs":
        raise ValueError("allow_priority and scheduling_policy='fcfs' exclude each other")
    path = resolve_model(asked.model, revision=asked.revision, download_dir=asked.download_dir)
    if not has_tokenizer(asked.tokenizer, path):
        raise ValueError(f"{asked.model} has no tokenizer; --tokenizer names one")
    waits: Any = dict(max_waiting=options.max_waiting, grammar_seconds=options.grammar_seconds)
    llm = AsyncLLM(**waits, **engine)
    log_unused(engine, llm.config.device)
    return llm


def default_params(llm: AsyncLLM, given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The parameters of bodies that do not set them: those `given`, or the model's recommended."""
    own = recommended_fields(llm.get_default_sampling_params())
    return {url: {"max_tokens": most, **own, **given} for url, most in MAX_TOKENS.items()}


def _run(work: Any) -> int:
    """Run on uvloop if it is installed."""
    try:
        from uvloop import run
    except ImportError:
        from asyncio import run
    return int(run(work))


def _check_certificate(options: ServerOptions) -> None:
    """Raise if TLS is asked for with files that cannot be used."""
    if options.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except OSError as error:
        raise OSError(f"ssl_certfile and ssl_keyfile cannot be used: {error}") from None


@contextlib.contextmanager
def _listening(options: ServerOptions) -> Iterator[socket.socket]:
    """A listening socket; a socket that is only bound could share its port with another."""
    if options.uds is not None:
        place: Any = options.uds
        _remove_unused(options.uds)
        listener = socket.socket(socket.AF_UNIX)
    else:
        place = (options.host, options.port)
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with listener:
        try:
            listener.bind(place)
            listener.listen(BACKLOG)
        except OSError as error:
            raise OSError(f"cannot listen at {_shown(options)}: {error}") from None
        try:
            yield listener
        finally:
            if options.uds is not None:
                Path(options.uds).unlink(missing_ok=True)


def _remove_unused(place: str) -> None:
    """Remove the Unix socket of a server that was killed."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(place)
        except ConnectionRefusedError:
            if Path(place).is_socket():
                Path(place).unlink()
        except OSError:
            return


def _shown(options: ServerOptions, port: int | None = None) -> str:
    """The address as a client writes it."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    host = f"[{options.host}]" if ":" in options.host else options.host
    scheme = "https" if options.ssl_certfile else "http"
    return f"{scheme}://{host}:{options.port if port is None else port}"


@contextlib.contextmanager
def _signals_call(take: Callable[[], None]) -> Iterator[None]:
    """Make the signals call `take` in the block; ignore them after it, if it has not failed."""
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, take)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class _Life:
    """One run of a server."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions, sampling: Mapping[str, Any]) -> None:
        self._llm, self._options = llm, options
        app, self._guard = make_app(llm, options, default_params(llm, sampling))
        self._server = HTTPServer(app, options)
        self._signals = 0
        self._asked = asyncio.Event()

    async def run(self, listener: socket.socket, announce: Callable[[str], None]) -> int:
        """Serve, drain and end."""
        with _signals_call(self._take_signal):
            has_failed = await self._serve(listener, announce)
        await self._llm.aclose()
        return 1 if has_failed else 0

    async def _serve(self, listener: socket.socket, announce: Callable[[str], None]) -> bool:
        """Serve until a signal or the end of the engine; returns whether the engine has ended."""
        await self._llm.stats()  # from here on its end is noticed
        serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        ended = asyncio.ensure_future(self._llm.wait_for_failure())
        asked = asyncio.ensure_future(self._asked.wait())
        while not self._server.started and not serving.done():
            await asyncio.sleep(CHECK_SECONDS)
        if serving.done():
            await serving  # which raises why it has not started
        name = listener.getsockname()
        announce(_shown(self._options, None if self._options.uds else name[1]))
        await asyncio.wait({serving, ended, asked}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            logger.error("the engine has ended: %s", str(ended.result()).split("\n")[0])
            await asyncio.sleep(LAST_SECONDS / 2)
        elif asked.done():
            await self._drain()
        self._server.should_exit = True
        await serving
        for task in (ended, asked):
            task.cancel()
        return ended.done() and not ended.cancelled()

    def _take_signal(self) -> None:
        """Drain at the first signal, end at the second one."""
        self._signals += 1
        self._asked.set()

    async def _drain(self) -> None:
        """Let running requests finish, for some time."""
        self._guard.is_draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.drain_seconds
        logger.info("draining: requests being answered: %d", self._guard.num_active)
        while self._guard.num_active and self._signals == 1 and loop.time() < deadline:
            await asyncio.sleep(CHECK_SECONDS)
        self._llm.end_all(APIError(503, "the server has ended before the answer", "draining"))
        await asyncio.sleep(2 * CHECK_SECONDS)  # to send responses
