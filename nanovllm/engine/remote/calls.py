"""Calls: the requests that callers of an AsyncLLM wait for. The engine's events are for them."""

import contextlib
import dataclasses
import itertools
from array import array
from collections.abc import Iterator
from typing import Any

from nanovllm.engine.errors import EngineFullError
from nanovllm.engine.ranks.command import by_value
from nanovllm.engine.remote.call import Call
from nanovllm.engine.remote.connection import Connection
from nanovllm.engine.remote.messages import (
    Drop,
    Ended,
    Event,
    Progress,
    Refused,
    Stop,
    Submit,
    Tokens,
)
from nanovllm.engine.remote.mirror import Mirror
from nanovllm.engine.requests.intake import Accepted
from nanovllm.lora_request import LoRARequest
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import shorten


class Calls:
    """The open calls by their numbers, and how many samples they wait for: `num_open`.

    At most `max_num_seqs` run and `max_waiting` wait. What is wrong with one call ends that one.
    """

    def __init__(self, connection: Connection, max_num_seqs: int, max_waiting: int) -> None:
        self._connection = connection
        self._max_num_seqs, self._max_waiting = max_num_seqs, max_waiting
        self.num_open = 0
        self.by_number: dict[int, Call] = {}
        self._numbers = itertools.count()

    def check_room(self, num_samples: int) -> None:
        """Raise if so many samples more may not wait."""
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
        """Keep room during the block, for calls that are opened without being counted."""
        self.check_room(num_samples)
        self.num_open += num_samples
        try:
            yield
        finally:
            self.num_open -= num_samples

    def open(
        self,
        accepted: Accepted,
        mirror: Mirror,
        params: SamplingParams,
        name: Any = None,
        is_whole: bool = True,
        lora_request: LoRARequest | None = None,
        is_counted: bool = True,
    ) -> Call:
        """Queue a request. Its tokens are followed by `mirror`."""
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
        message = Submit(number, token_ids, params, accepted.wanted, lora_request, processors)
        self._connection.send(message)
        call = self.by_number[number] = Call(number, name, mirror, is_whole, num_open)
        self.num_open += num_open
        return call

    def close(self, call: Call) -> None:
        """No caller waits for this one any more: abort what is not finished."""
        if not call.is_over:
            self.drop(call)
        del self.by_number[call.number]
        self._count(call, 0)

    def find(self, name: Any) -> Call | None:
        """The open call of this name."""
        return next((call for call in self.by_number.values() if call.name == name), None)

    def drop(self, call: Call, error: BaseException | None = None) -> None:
        """End a request here and in the engine; its caller gets the error, if there is one."""
        with contextlib.suppress(RuntimeError, OSError):
            self._connection.send(Drop(call.number))
        for seq in call.mirror.request.unfinished:
            seq.finish("abort")
        self._count(call, 0)
        call.end(error)

    def drop_all(self, error: BaseException) -> None:
        """End all requests; their callers get this error."""
        for call in self.by_number.values():
            if not call.is_over:
                self.drop(call, error)

    def end_all(self, failure: BaseException) -> None:
        """The engine has ended: no call goes on."""
        for call in self.by_number.values():
            call.end(failure)

    def take(self, event: Event) -> None:
        """Pass an event on to the calls that it is for, if they still wait."""
        if isinstance(event, Tokens):
            for number, sample, token_id in zip(*event, strict=True):
                if (call := self._waiting(number)) is not None:
                    try:
                        if call.mirror.add(sample, token_id):
                            self._stop(call, sample)
                        call.note_change()
                    except Exception as error:  # such as a tokenizer's that does not know an id
                        self.drop(call, error)
        elif (call := self._waiting(event.number)) is not None:
            try:
                self._apply(call, event)
            except Exception as error:
                self.drop(call, error)

    def _waiting(self, number: int) -> Call | None:
        call = self.by_number.get(number)
        return None if call is None or call.is_over else call

    def _apply(self, call: Call, event: Progress | Refused | Ended) -> None:
        if isinstance(event, Progress):
            if call.mirror.apply(event):
                self._stop(call, event.sample)
            elif event.reason is not None:
                self._count(call, len(call.mirror.request.unfinished))
            call.note_change()
        elif isinstance(event, Refused):
            call.end(event.error)
        else:
            call.mirror.end(event)
            call.end()

    def _stop(self, call: Call, sample: int) -> None:
        """A stop was found in a sample's text, of which the engine does not know."""
        self._connection.send(Stop(call.number, sample))
        self._count(call, len(call.mirror.request.unfinished))

    def _count(self, call: Call, num_open: int) -> None:
        """Samples of a call have ended: at most this many are left."""
        left = min(num_open, call.num_open)
        self.num_open += left - call.num_open
        call.num_open = left


def pickled_processors(params: SamplingParams) -> bytes | None:
    """The callables of a request, for the engine's process; a ValueError if they do not pickle."""
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
