"""AsyncEngine: an engine in a process of its own, for the callers of one event loop."""

import asyncio
import contextlib
import dataclasses
import functools
import os
from collections.abc import AsyncIterator
from typing import Any

from nanovllm.config import MAX_WAITING, Config
from nanovllm.engine.errors import EngineEndedError
from nanovllm.engine.features import NO_FEATURES, Features
from nanovllm.engine.remote.call import Call
from nanovllm.engine.remote.calls import Calls, pickled_processors
from nanovllm.engine.remote.connection import Connection
from nanovllm.engine.remote.controls import Controls
from nanovllm.engine.remote.messages import Event
from nanovllm.engine.remote.mirror import Mirror
from nanovllm.engine.remote.readers import Readers, params_size, prompt_size
from nanovllm.engine.requests.intake import Accepted, Intake, check_whole
from nanovllm.engine.requests.tokenizer import load_tokenizer
from nanovllm.lora_request import NOT_ENABLED, LoRARequest, check_lora_request
from nanovllm.models.generation_config import recommended_params
from nanovllm.models.loader import resolve_model
from nanovllm.prompts import Prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_int, shorten


class AsyncEngine(Controls):
    """Queues requests of callers, and hands the engine's events on to them.

    Options are those of `AsyncLLM`. Prompts are read, and texts and stops are followed, in this
    process; the engine's process only steps.
    """

    features: Features = NO_FEATURES

    def __init__(
        self, model: str | os.PathLike[str], *, max_waiting: int = MAX_WAITING, **options: Any
    ) -> None:
        asked = self._asked = Config(model=model, **options)  # type: ignore[arg-type]
        self.max_waiting = check_int("max_waiting", max_waiting, 0)
        self.model_path = path = resolve_model(
            asked.model, revision=asked.revision, download_dir=asked.download_dir
        )
        super().__init__(Connection(asked.model, options, self._take, self._end_calls))
        try:
            has_meaning = asked.load_format != "dummy"
            self.tokenizer = load_tokenizer(
                asked.tokenizer, path, download_dir=asked.download_dir, warns=has_meaning
            )
            self.config, self.model_config = self._connection.wait_until_ready()
        except BaseException:
            self._connection.process.close()
            raise
        self._calls = Calls(self._connection, self.config.max_num_seqs, max_waiting)
        self._intake = Intake(self.config, self.model_config, self.tokenizer, self.features)
        self._readers = Readers()

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
    ) -> AsyncIterator[Call]:
        """Queue a request for the time of the block; what is not finished then is aborted.

        Of one that `is_whole` only the output is asked for, at the end.
        """
        params = params_of(sampling_params, priority)
        self._check_adapter(lora_request)
        if not is_whole:
            check_whole(params)
        pickled_processors(params)
        self._calls.check_room(params.n)
        accept = functools.partial(self._intake.accept, prompt, _unconstrained(params))
        self.check()
        accepted = await self._readers.run(accept, prompt_size(prompt) + params_size(params))
        queued = self._queued(
            accepted, params, name=request_id, is_whole=is_whole, lora_request=lora_request
        )
        async with queued as call:
            yield call

    @contextlib.asynccontextmanager
    async def _queued(
        self, accepted: Accepted, params: SamplingParams, is_whole: bool = True, **options: Any
    ) -> AsyncIterator[Call]:
        """Queue what was accepted for the time of the block. Options are those of `Calls.open`."""
        await self._connection.open()
        mirror = Mirror(self._intake.request(accepted, streams=not is_whole), self.tokenizer)
        call = self._calls.open(accepted, mirror, params, is_whole=is_whole, **options)
        try:
            yield call
        finally:
            self._calls.close(call)

    @property
    def num_open(self) -> int:
        """The samples that callers wait for."""
        return self._calls.num_open

    async def abort(self, request_id: Any) -> None:
        """End the request of this name; its caller gets a last event, with "abort"."""
        self.check()
        call = self._calls.find(request_id)
        if call is None:
            raise ValueError(f"request_id must be that of a request, got {shorten(request_id)}")
        self._calls.drop(call)

    def end_all(self, error: BaseException) -> None:
        """End all requests; their callers get this error."""
        self._calls.drop_all(error)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that the model's `generation_config.json` recommends."""
        return recommended_params(self.model_path)

    async def check_adapter(self, lora_request: LoRARequest) -> None:
        """Read an adapter for requests to come; raises if it does not fit the model."""
        self._check_adapter(lora_request)
        await self._connection.ask("check_adapter", lora_request, beside=True)

    def _check_adapter(self, lora_request: Any) -> None:
        if check_lora_request(lora_request) is not None and not self.config.enable_lora:
            raise ValueError(NOT_ENABLED)

    async def wait_for_failure(self) -> BaseException:
        """Wait until the engine has ended; returns why."""
        return await self._connection.wait_for_end()

    def check(self) -> None:
        """Raise if the engine has ended."""
        self._connection.check()

    def close(self) -> None:
        """End the engine after its step, and free what it used. Idempotent.

        Calls that still wait get a RuntimeError. It blocks for the time of a step or two, and is
        for the event loop's thread, or when that has ended.
        """
        self._disconnect()
        self._connection.process.close()

    async def aclose(self) -> None:
        """`close`, without blocking the event loop."""
        self._disconnect()
        await asyncio.to_thread(self._connection.process.close)

    def _disconnect(self) -> None:
        """End all calls, and listen no more."""
        self._connection.disconnect(EngineEndedError("this AsyncLLM is closed; make a new one"))
        self._readers.close()

    def _take(self, event: Event) -> None:
        self._calls.take(event)

    def _end_calls(self, failure: BaseException) -> None:
        self._calls.end_all(failure)


def params_of(given: Any, priority: int | None) -> SamplingParams:
    """The parameters that a caller gave, with another priority if that is given too."""
    params = SamplingParams() if given is None else given
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be a SamplingParams, got {shorten(params)}")
    return params if priority is None else dataclasses.replace(params, priority=priority)


def _unconstrained(params: SamplingParams) -> SamplingParams:
    """The parameters without a constraint, which the engine's process compiles."""
    if params.structured_outputs is None:
        return params
    return dataclasses.replace(params, structured_outputs=None)
