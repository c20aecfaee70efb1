"""RequestTable: the requests that callers of an AsyncLLM wait for, and their events."""

import contextlib
import dataclasses
import itertools
from array import array
from collections.abc import Iterator
from typing import Any

from nanovllm.engine.errors import EngineFullError
from nanovllm.engine.ranks.frames import by_value
from nanovllm.engine.remote.connection import EngineConnection
from nanovllm.engine.remote.messages import (
    DropRequest,
    Event,
    NewTokens,
    PromptProgress,
    RequestEnd,
    RequestRefused,
    SampleProgress,
    StopSample,
    SubmitRequest,
)
from nanovllm.engine.remote.open_request import OpenRequest
from nanovllm.engine.remote.request_copy import RequestCopy
from nanovllm.engine.requests.intake import Accepted
from nanovllm.lora_request import LoRARequest
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured_outputs import GRAMMAR_SECONDS
from nanovllm.utils.checks import shorten


class RequestTable:
    """The open requests by their numbers, and `num_open`, the samples that callers wait for.

    At most `max_num_seqs` run and `max_waiting` wait. An error in one request ends only this
    request. A request waits `grammar_seconds` until its constraint is compiled.
    """

    def __init__(
        self,
        connection: EngineConnection,
        max_num_seqs: int,
        max_waiting: int,
        grammar_seconds: float = GRAMMAR_SECONDS,
    ) -> None:
        self._connection, self._grammar_seconds = connection, grammar_seconds
        self._max_num_seqs, self._max_waiting = max_num_seqs, max_waiting
        self.num_open = 0
        self.by_number: dict[int, OpenRequest] = {}
        self._numbers = itertools.count()

    def check_room(self, num_samples: int) -> None:
        """Raise if queueing `num_samples` more would exceed the limit."""
        most = self._max_num_seqs + self._max_waiting
        if num_samples > most:
            raise ValueError(f"n must be at most {most} (max_num_seqs and max_waiting)")
        if self.num_open + num_samples > most:
            raise EngineFullError(
                f"{self.num_open} samples run or wait, and at most {most} may (max_num_seqs="
                f"{self._max_num_seqs}, max_waiting={self._max_waiting}); try again later"
            )

    @contextlib.contextmanager
    def room(self, num_samples: int) -> Iterator[None]:
        """Reserve room during the block, for requests that `open` does not count."""
        self.check_room(num_samples)
        self.num_open += num_samples
        try:
            yield
        finally:
            self.num_open -= num_samples

    def open(
        self,
        accepted: Accepted,
        copy: RequestCopy,
        params: SamplingParams,
        name: Any = None,
        is_whole: bool = True,
        lora_request: LoRARequest | None = None,
        is_counted: bool = True,
    ) -> OpenRequest:
        """Queue a request; `copy` gets its tokens."""
        self._connection.check()
        num_open = params.n if is_counted else 0
        self.check_room(num_open)
        number = next(self._numbers)
        if name is None:
            name = f"request-{number}"
        elif self.find(name) is not None:
            raise ValueError(f"request_id {shorten(name)} is that of another request")
        token_ids = array("i", accepted.token_ids).tobytes()
        processors = pickled_processors(params)
        if params.stop is not None or processors is not None:  # stops are found here
            params = dataclasses.replace(params, stop=None, logits_processors=None)
        message = SubmitRequest(
            number,
            token_ids,
            params,
            accepted.wanted,
            lora_request,
            processors,
            self._grammar_seconds,
            accepted.salt,
        )
        self._connection.send(message)
        request = self.by_number[number] = OpenRequest(number, name, copy, is_whole, num_open)
        self.num_open += num_open
        return request

    def close(self, request: OpenRequest) -> None:
        """Remove a request that no caller waits for, and abort its unfinished samples."""
        if not request.is_over:
            self.drop(request)
        del self.by_number[request.number]
        self._count(request, 0)

    def find(self, name: Any) -> OpenRequest | None:
        """The open request of this name."""
        return next((request for request in self.by_number.values() if request.name == name), None)

    def drop(self, request: OpenRequest, error: BaseException | None = None) -> None:
        """End a request here and in the engine; its caller gets the error, if there is one."""
        with contextlib.suppress(RuntimeError, OSError):
            self._connection.send(DropRequest(request.number))
        for seq in request.copy.request.unfinished:
            seq.finish("abort")
        self._count(request, 0)
        request.end(error)

    def drop_all(self, error: BaseException) -> None:
        """End all requests; their callers get this error."""
        for request in self.by_number.values():
            if not request.is_over:
                self.drop(request, error)

    def end_all(self, failure: BaseException) -> None:
        """End all requests with this error, as the engine has ended."""
        for request in self.by_number.values():
            request.end(failure)

    def take(self, event: Event) -> None:
        """Pass an event on to its requests, if their callers still wait."""
        if isinstance(event, NewTokens):
            for number, sample, token_id in zip(*event, strict=True):
                if (request := self._waiting(number)) is not None:
                    try:
                        if request.copy.add(sample, token_id):
                            self._stop(request, sample)
                        request.wake()
                    except Exception as error:  # such as a tokenizer's for an unknown id
                        self.drop(request, error)
        elif (request := self._waiting(event.number)) is not None:
            try:
                self._apply(request, event)
            except Exception as error:
                self.drop(request, error)

    def _waiting(self, number: int) -> OpenRequest | None:
        request = self.by_number.get(number)
        return None if request is None or request.is_over else request

    def _apply(
        self,
        request: OpenRequest,
        event: PromptProgress | SampleProgress | RequestRefused | RequestEnd,
    ) -> None:
        if isinstance(event, SampleProgress):
            if request.copy.apply(event):
                self._stop(request, event.sample)
            elif event.reason is not None:
                self._count(request, len(request.copy.request.unfinished))
            request.wake()
        elif isinstance(event, PromptProgress):
            request.copy.add_prompt(event)
        elif isinstance(event, RequestRefused):
            request.end(event.error)
        else:
            request.copy.end(event)
            request.end()

    def _stop(self, request: OpenRequest, sample: int) -> None:
        """End a sample in the engine, after a stop was found in its text."""
        self._connection.send(StopSample(request.number, sample))
        self._count(request, len(request.copy.request.unfinished))

    def _count(self, request: OpenRequest, num_open: int) -> None:
        """Count samples as ended, until `num_open` of the request are left."""
        left = min(num_open, request.num_open)
        self.num_open += left - request.num_open
        request.num_open = left


def pickled_processors(params: SamplingParams) -> bytes | None:
    """Pickle a request's callables for the engine's process; a ValueError if this fails."""
    if not params.logits_processors:
        return None
    try:
        return by_value(params.logits_processors)
    except Exception as error:
        raise ValueError(
            "logits_processors must pickle, as an AsyncLLM's engine is another process: define them"
            " at the top of a module that can be imported, or install cloudpickle; got"
            f" {type(error).__name__}: {error}"
        ) from None
