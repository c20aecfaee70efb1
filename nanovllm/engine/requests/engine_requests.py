"""EngineRequests: an engine's requests, from the queue until outputs are returned."""

import time
from collections.abc import Iterable
from typing import Any

from nanovllm.engine.requests.measures import RequestMeter, StepCounter
from nanovllm.engine.requests.request import Request
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.scheduler import Scheduler
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.outputs import RequestOutput


class EngineRequests:
    """Requests by id: in `unfinished`, and then in `finished` until their output is returned.

    The samples of unfinished requests are in the `scheduler`. Requests that end are counted.
    """

    def __init__(self, scheduler: Scheduler, counter: StepCounter) -> None:
        self.unfinished: dict[int, Request] = {}
        self.finished: dict[int, Request] = {}
        self.counter = counter
        self.meter = RequestMeter()
        self._scheduler = scheduler
        self._begun: dict[int, Request] = {}  # scheduled, without a first token yet
        self._streaming: set[int] = set()  # requests with outputs that an iterator returns
        self._discarded: set[int] = set()

    @property
    def all(self) -> list[Request]:
        """Unfinished and finished requests."""
        return [*self.unfinished.values(), *self.finished.values()]

    @property
    def are_done(self) -> bool:
        """Whether all requests have finished, and only iterators have outputs to return."""
        return not self.unfinished and self.finished.keys() <= self._streaming

    @property
    def num_running_tokens(self) -> int:
        """The tokens that unfinished requests have generated."""
        return sum(sum(request.nums_generated) for request in self.unfinished.values())

    def add(self, request: Request, streams: bool) -> None:
        """Add a new request. If it `streams`, `step` does not return its output."""
        if streams:
            self._streaming.add(request.request_id)
        self.unfinished[request.request_id] = request

    def begin(self, batch: Batch, now: float) -> None:
        """Record the requests that a step schedules for the first time."""
        for seq in batch.seqs:
            request = self.unfinished[seq.request_id]
            if request.times.first_token is None:
                self._begun[seq.request_id] = request
            if request.times.scheduled is None:
                request.times.scheduled = now
                self.counter.cache_queries += seq.num_prompt_tokens
                self.counter.cache_hits += seq.num_hit_tokens or 0

    def complete(self, batch: Batch, ended: Iterable[Sequence], now: float) -> None:
        """Record first tokens of a step, and finish the requests of sequences that it ended."""
        if self._begun:
            for seq in batch.sampling_seqs:
                if (request := self._begun.pop(seq.request_id, None)) is not None:
                    request.times.first_token = now
                    self.meter.first_token.add(now - request.times.arrived)
        for request_id in dict.fromkeys(seq.request_id for seq in ended):
            self._finish(self.unfinished[request_id], now)

    def fail(self, errors: dict[int, Exception], what: str) -> None:
        """End the requests of these ids with errors, which are about the parameter `what`."""
        for request_id, error in errors.items():
            request = self.unfinished[request_id]
            unfinished = request.unfinished
            self._scheduler.abort(*unfinished)
            for seq in unfinished:
                seq.finish_reason, seq.stop_reason = "error", f"{what}: {error}"
            self._finish(request, time.perf_counter())

    def stop(self, request: Request, index: int) -> None:
        """End a sample, as a stop was found in its text."""
        seq = request.seqs[index]
        self._scheduler.abort(seq)
        seq.finish_reason = "stop"
        self._finish(request, time.perf_counter())

    def _finish(self, request: Request, now: float) -> None:
        """Count a request, if all its samples have ended."""
        if request.unfinished:
            return
        request.end(now)
        self._begun.pop(request.request_id, None)  # without a first token
        self.counter.finished += 1
        self.finished[request.request_id] = request
        del self.unfinished[request.request_id]
        request.measure(self.meter)

    def abort(self, request: Request, keeps_output: bool = False) -> None:
        """End a request that has not finished, and count it."""
        if keeps_output:
            self.finished[request.request_id] = request
        del self.unfinished[request.request_id]
        self._scheduler.abort(*request.unfinished)
        self._begun.pop(request.request_id, None)
        request.end(time.perf_counter())
        self.counter.aborted += 1
        request.measure(self.meter)

    def discard(self, request_ids: Iterable[int]) -> None:
        """End requests and drop their outputs, finished or not, at the next `drop_discarded`."""
        self._discarded.update(request_ids)

    def drop_discarded(self) -> None:
        """End the discarded requests and drop their outputs."""
        while self._discarded:
            request_id = self._discarded.pop()
            if (request := self.unfinished.get(request_id)) is not None:
                self.abort(request)
            self.drop_output(request_id)

    def drop_output(self, request_id: int) -> None:
        """Drop the output of a finished request: it was returned, or is not wanted."""
        self.finished.pop(request_id, None)
        self._streaming.discard(request_id)

    def claim(self, request_ids: list[int], tokenizer: Any) -> list[RequestOutput]:
        """The outputs of finished requests, which are then dropped."""
        outputs = [self.finished[i].output(tokenizer) for i in request_ids]
        for request_id in request_ids:
            self.drop_output(request_id)
        return outputs

    def claim_all(self, tokenizer: Any) -> list[RequestOutput]:
        """The outputs of all finished requests, except those that iterators return."""
        return self.claim([i for i in self.finished if i not in self._streaming], tokenizer)

    def keep_only(self, requests: Iterable[Request]) -> None:
        """Go on with these `requests` only, after an interrupt. Any may be half done.

        Aborted requests stay aborted, and those with an output to return stay finished. Others
        will start over: their followers are reset.
        """
        self._begun.clear()
        kept = {
            r.request_id: r for r in requests if not r.is_aborted or r.request_id in self.finished
        }
        dropped = [r for request_id, r in self.unfinished.items() if request_id not in kept]
        self.finished = {i: r for i, r in kept.items() if not r.unfinished}
        self.unfinished = {i: r for i, r in kept.items() if r.unfinished}
        self.counter.aborted += len(dropped)
        for request in dropped:
            request.measure(self.meter)
        self._streaming &= kept.keys()
        for seq in (seq for request in kept.values() for seq in request.seqs):
            for follower in seq.followers:
                follower.reset()
