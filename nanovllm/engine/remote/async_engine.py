"""AsyncEngine: an engine in a process of its own, for the callers of one event loop."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.config import MAX_WAITING, ModelName, asked_by
from nanovllm.engine.errors import EngineEndedError
from nanovllm.engine.features import NO_FEATURES, Features, RequestAdapters
from nanovllm.engine.remote.connection import EngineConnection
from nanovllm.engine.remote.messages import Event
from nanovllm.engine.remote.open_request import OpenRequest
from nanovllm.engine.remote.readers import Readers, params_size, prompt_size
from nanovllm.engine.remote.request_copy import RequestCopy
from nanovllm.engine.remote.request_table import RequestTable, pickled_processors
from nanovllm.engine.requests.given_priority import with_priority
from nanovllm.engine.requests.intake import Accepted, Intake, check_whole
from nanovllm.engine.requests.tokenizer import load_tokenizer
from nanovllm.lora_request import NOT_ENABLED, LoRARequest, check_lora_request
from nanovllm.metrics import Metric
from nanovllm.models.checkpoint import resolve_model
from nanovllm.models.generation_config import recommended_params
from nanovllm.outputs import EngineStats
from nanovllm.prompts import Prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured_outputs import GRAMMAR_SECONDS
from nanovllm.utils.checks import check_int, shorten
from nanovllm.utils.option import float_range

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nanovllm.engine_options import EngineOptions


class AsyncEngine:
    """Queues requests of callers, and passes the engine's events to them.

    Options are those of `AsyncLLM`. This process tokenizes prompts, decodes texts and finds stops;
    the engine's process, the `main` of the module `PROCESS`, only steps, and answers questions
    between two steps.
    """

    features: Features = NO_FEATURES
    PROCESS = "nanovllm.engine_main"

    def __init__(
        self,
        model: ModelName = None,
        *,
        max_waiting: int = MAX_WAITING,
        grammar_seconds: float = GRAMMAR_SECONDS,
        **options: "Unpack[EngineOptions]",
    ) -> None:
        asked = self.asked = asked_by(self, model, options)
        options["scheduling"] = asked.scheduling or "fair"  # callers wait for tokens
        self.max_waiting = check_int("max_waiting", max_waiting, 0)
        float_range(0.0, above=True).check("grammar_seconds", grammar_seconds)
        self.model_path = path = resolve_model(
            asked.model, revision=asked.revision, download_dir=asked.download_dir
        )
        self.connection = EngineConnection(
            self.PROCESS, asked.model, options, self._take, self._end_requests
        )
        try:
            has_meaning = asked.load_format != "dummy"
            self.tokenizer = load_tokenizer(
                asked.tokenizer, path, download_dir=asked.download_dir, warns=has_meaning
            )
            self.config, self.model_config = self.connection.wait_until_ready()
        except BaseException:
            self.connection.process.close()
            raise
        self.open_requests = RequestTable(
            self.connection, self.config.max_num_seqs, max_waiting, grammar_seconds
        )
        # The engine's process has the adapters.
        self.intake = Intake(
            self.config, self.model_config, self.tokenizer, self.features, RequestAdapters()
        )
        self.readers = Readers()

    @contextlib.asynccontextmanager
    async def request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: Any = None,
        priority: int | None = None,
        lora_request: LoRARequest | None = None,
        is_whole: bool = False,
    ) -> AsyncIterator[OpenRequest]:
        """Queue a request during the block; at the block's end it is aborted if not finished.

        If it `is_whole`, only the output at the end is used.
        """
        params = params_of(sampling_params, priority)
        self.check_lora(lora_request)
        if not is_whole:
            check_whole(params)
        pickled_processors(params)
        self.open_requests.check_room(params.n)
        self.check()
        accepted = await self.readers.run(
            lambda: self.intake.accept(prompt, _for_copy(params)),
            prompt_size(prompt) + params_size(params),
        )
        queued = self.queued(
            accepted, params, name=request_id, is_whole=is_whole, lora_request=lora_request
        )
        async with queued as request:
            yield request

    @contextlib.asynccontextmanager
    async def queued(
        self, accepted: Accepted, params: SamplingParams, is_whole: bool = True, **options: Any
    ) -> AsyncIterator[OpenRequest]:
        """Queue an accepted request during the block; options are those of `RequestTable.open`."""
        await self.connection.open()
        copy = RequestCopy(self.intake.request(accepted, streams=not is_whole), self.tokenizer)
        request = self.open_requests.open(accepted, copy, params, is_whole=is_whole, **options)
        try:
            yield request
        finally:
            self.open_requests.close(request)

    @property
    def num_open(self) -> int:
        """The samples that callers wait for."""
        return self.open_requests.num_open

    async def abort(self, request_id: Any) -> None:
        """End the request of this name; its caller gets a last event, with "abort"."""
        self.check()
        request = self.open_requests.find(request_id)
        if request is None:
            raise ValueError(f"request_id must be that of a request, got {shorten(request_id)}")
        self.open_requests.drop(request)

    def end_all(self, error: BaseException) -> None:
        """End all requests; their callers get this error."""
        self.open_requests.drop_all(error)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that the model's `generation_config.json` recommends."""
        return recommended_params(self.model_path)

    async def check_adapter(self, lora_request: LoRARequest) -> None:
        """Read an adapter for later requests; raises if it does not fit the model."""
        self.check_lora(lora_request)
        await self.connection.ask("check_adapter", lora_request, between_steps=False)

    def check_lora(self, lora_request: Any) -> None:
        """Raise if this is not an adapter, or the engine has none. None means no adapter."""
        if check_lora_request(lora_request) is not None and not self.config.enable_lora:
            raise ValueError(NOT_ENABLED)

    async def stats(self) -> EngineStats:
        """Counts of the engine's requests, tokens and blocks."""
        stats: EngineStats = await self.connection.ask("stats")
        return stats

    async def get_metrics(self) -> list[Metric]:
        """The metrics of `LLM.get_metrics`."""
        metrics: list[Metric] = await self.connection.ask("get_metrics")
        return metrics

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache."""
        done: bool = await self.connection.ask("reset_prefix_cache")
        return done

    async def start_profile(self) -> None:
        """Start the profiler, as `LLM.start_profile`."""
        await self.connection.ask("start_profile")

    async def stop_profile(self) -> list[Path]:
        """Stop the profiler; returns the traces."""
        paths: list[Path] = await self.connection.ask("stop_profile")
        return paths

    async def ping(self, seconds: float) -> None:
        """Raise an asyncio.TimeoutError if the engine's process has not answered for this long."""
        await self.connection.ping(seconds)

    async def wait_for_failure(self) -> BaseException:
        """Wait until the engine has ended; returns why."""
        return await self.connection.wait_for_end()

    def check(self) -> None:
        """Raise if the engine has ended."""
        self.connection.check()

    def close(self) -> None:
        """End the engine after its step, and free what it used. Idempotent.

        Callers that still wait get a RuntimeError. It blocks for the time of a step or two. Call it
        in the event loop's thread, or when the loop has ended.
        """
        self._disconnect()
        self.connection.process.close()

    async def aclose(self) -> None:
        """`close`, without blocking the event loop."""
        self._disconnect()
        await asyncio.to_thread(self.connection.process.close)

    def _disconnect(self) -> None:
        """End all requests, and stop listening."""
        self.connection.disconnect(EngineEndedError("this AsyncLLM is closed; make a new one"))
        self.readers.close()

    def _take(self, event: Event) -> None:
        self.open_requests.take(event)

    def _end_requests(self, failure: BaseException) -> None:
        self.open_requests.end_all(failure)


def params_of(given: Any, priority: int | None) -> SamplingParams:
    """A copy of the caller's parameters, with the call's `priority` if it is given."""
    params = SamplingParams() if given is None else given
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be a SamplingParams, got {shorten(params)}")
    return with_priority(params, priority)


def _for_copy(params: SamplingParams) -> SamplingParams:
    """The parameters without what only the engine's process prepares: a constraint, bad words."""
    if params.structured_outputs is None and not params.bad_words:
        return params
    return dataclasses.replace(params, structured_outputs=None, bad_words=None)
