"""LLMEngine: requests in, outputs out, one step at a time. It owns scheduler and runner."""

import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nanovllm.config import Config
from nanovllm.engine.batch import Batch
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.requests.intake import Intake, Prompt
from nanovllm.engine.requests.request import Request
from nanovllm.engine.requests.tokenizer import load_tokenizer
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step.launched import Launched
from nanovllm.engine.workers import Workers
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import resolve_model
from nanovllm.outputs import EngineStats, RequestOutput
from nanovllm.sampling_params import SamplingParams

logger = logging.getLogger("nanovllm")

T = TypeVar("T")


@dataclass(slots=True)
class StepCounter:
    """Tokens computed and seconds spent, by kind of step; what requests came to."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    finished: int = 0
    aborted: int = 0
    cache_queries: int = 0
    cache_hits: int = 0

    def add(self, batch: Batch, tokens: int, seconds: float) -> None:
        """Book one step; the time of a mixed one by its tokens."""
        decodes = batch.num_decodes if batch.is_prefill else tokens
        self.decode_tokens += decodes
        self.decode_seconds += seconds * decodes / tokens
        self.prefill_tokens += tokens - decodes
        self.prefill_seconds += seconds * (tokens - decodes) / tokens


def exclusive(method: Callable[..., T]) -> Callable[..., T]:
    """Let `method` run alone and as a whole: if it raises, what it began is taken back.

    Requests that were there before it stay; those that it added are gone.
    """

    @functools.wraps(method)
    def run(self: "LLMEngine", *args: Any) -> T:
        if self._generating:
            raise RuntimeError("this LLM is generating already; one call at a time")
        self._drop_abandoned()
        before = [*self._requests.values(), *self._finished.values()]
        try:
            self._generating = True
            result = method(self, *args)
            self._generating = False
        except BaseException:
            self._recover(before)
            if self._runner.failure is not None or self._close_asked:
                self.close()
            raise
        if self._close_asked:
            self.close()
        return result

    return run


class LLMEngine:
    """An engine on one model. Options are the fields of `Config`.

    Step by step: `add_request`, then `step` until `is_finished`. Not safe for several threads.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        config = Config.from_options(model, options)
        path = resolve_model(config.model)
        self.model_config = ModelConfig.from_dir(path)
        self.model_config.check_parallel_size(
            config.tensor_parallel_size, config.enable_expert_parallel
        )
        self.tokenizer = load_tokenizer(config.tokenizer, path)
        self._runner = start_runner(config, self.model_config, path)
        self._finalizer = weakref.finalize(self, self._runner.close)
        self.config = self._runner.config
        self.scheduler = Scheduler(self.config, self.model_config.longest_window)
        self.counter = StepCounter()
        self._intake = Intake(self.config, self.model_config, self.tokenizer)
        self.eos_token_ids = self._intake.eos_token_ids
        self._requests: dict[int, Request] = {}
        self._finished: dict[int, Request] = {}  # not yet returned to anyone
        self._abandoned: set[int] = set()
        self._streaming: set[int] = set()  # those whose outputs go to an iterator
        self._generating = False
        self._close_asked = False
        self._begun: dict[int, Request] = {}  # whose first token is to come
        self._launched: Launched | None = None  # a step on its way, whose tokens nobody has taken

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one request and return its id. A bad prompt raises and changes nothing."""
        self._check_open()
        params = SamplingParams() if sampling_params is None else sampling_params
        return self._enqueue(self._intake.encode(prompt, params), params)

    def step(self) -> list[RequestOutput]:
        """Run one step; return the outputs of the requests that it finished."""
        self._check_open()
        return self._step_and_claim()

    def abort_request(self, request_id: int) -> RequestOutput:
        """End an unfinished request, free its blocks, and return what it has generated."""
        self._check_open()
        if request_id not in self._requests:
            raise ValueError(f"request_id must be that of an unfinished request, got {request_id}")
        return self._abort(self._requests[request_id])

    def stats(self) -> EngineStats:
        """Count what the engine has done and is doing. Costs microseconds."""
        scheduler, counter = self.scheduler, self.counter
        blocks = scheduler.block_manager
        return EngineStats(
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_finished=counter.finished,
            num_aborted=counter.aborted,
            num_preemptions=scheduler.num_preemptions,
            prefill_tokens=counter.prefill_tokens,
            decode_tokens=counter.decode_tokens,
            prefix_cache_queries=counter.cache_queries,
            prefix_cache_hits=counter.cache_hits,
            blocks_used=blocks.num_blocks - blocks.num_free_blocks,
            num_blocks=blocks.num_blocks,
        )

    def is_finished(self) -> bool:
        """Whether every request has been finished and returned, or is a stream's to return."""
        return not self._requests and self._finished.keys() <= self._streaming

    def close(self) -> None:
        """Give back the device's memory and end the other ranks. Idempotent.

        Also done when the engine is collected and when Python ends. Asked for in the middle of a
        call, by a signal's handler or another thread, it ends that call after the step.
        """
        if self._generating:
            self._close_asked = True
            return
        self._launched = None
        self._finalizer()

    def __repr__(self) -> str:
        config = self.config
        ranks = f" {config.tensor_parallel_size} ranks," if config.tensor_parallel_size > 1 else ""
        return (
            f"{type(self).__name__}({config.model!r}, device={config.device!r},"
            f" dtype={config.dtype!r}, attention_backend={config.attention_backend!r},"
            f"{ranks}"
            f" {self.scheduler.block_manager.num_blocks * self.scheduler.block_size} KV tokens)"
        )

    @exclusive
    def _step_and_claim(self) -> list[RequestOutput]:
        if self._requests:
            self._step()
        return self._claim([i for i in self._finished if i not in self._streaming])

    @exclusive
    def _abort(self, request: Request) -> RequestOutput:
        self._end(request)
        del self._requests[request.request_id]
        return request.output(self.tokenizer)

    def _end(self, request: Request) -> None:
        self.scheduler.abort(*request.unfinished)
        self._begun.pop(request.request_id, None)
        request.times.ended = time.perf_counter()
        self.counter.aborted += 1

    def discard_requests(self, request_ids: list[int]) -> None:
        """End requests, finished or not, and drop their outputs."""
        self._abandon(request_ids)

    def _abandon(self, request_ids: list[int]) -> None:
        """End requests, finished or not, whose outputs nobody will ask for.

        A collected iterator may ask for it in the middle of a call: then it is the next one's work.
        """
        self._abandoned.update(request_ids)
        if self._finalizer.alive and not self._generating:
            self._drop_abandoned()

    def _drop_abandoned(self) -> None:
        while self._abandoned:
            request_id = self._abandoned.pop()
            if (request := self._requests.pop(request_id, None)) is not None:
                self._end(request)
            self._forget(request_id)

    def _forget(self, request_id: int) -> None:
        """A request's output has been handed out, or nobody will ask for it."""
        self._finished.pop(request_id, None)
        self._streaming.discard(request_id)

    def _step(self) -> None:
        """Take a step's tokens; what it finishes goes to `_finished`.

        If steps overlap, the next one is on its way meanwhile, unless it must know the tokens.
        """
        if self._close_asked:
            raise RuntimeError("this LLM was closed in the middle of the call; make a new one")
        start = time.perf_counter()
        launched = self._launched or self._launch()
        self._launched = None
        if launched is None:
            return
        batch = launched.batch
        if self.config.overlap and not any(seq.reads_tokens for seq in batch.sampling_seqs):
            self._launched = self._launch()
        finished = self.scheduler.postprocess(batch, self._runner.wait(launched))
        end = time.perf_counter()
        if self._begun:
            for seq in batch.sampling_seqs:
                if (request := self._begun.pop(seq.request_id, None)) is not None:
                    request.times.first_token = end
        for request_id in dict.fromkeys(seq.request_id for seq in finished):
            request = self._requests[request_id]
            if not request.unfinished:
                request.times.ended = end
                self.counter.finished += 1
                self._finished[request_id] = request
                del self._requests[request_id]
        self.counter.add(batch, launched.num_tokens, end - start)

    def _launch(self) -> Launched | None:
        """Begin the next step, if there is anything to do yet."""
        now = time.perf_counter()
        batch = self.scheduler.schedule()
        if batch is None:
            return None
        if batch.is_prefill:
            self._note_admissions(batch, now)
        launched = self._runner.launch(batch)
        self.scheduler.advance(batch)
        return launched

    def _note_admissions(self, batch: Batch, now: float) -> None:
        for seq in batch.seqs:
            request = self._requests[seq.request_id]
            if request.times.first_token is None:
                self._begun[seq.request_id] = request
            if request.times.scheduled is None:
                request.times.scheduled = now
                self.counter.cache_queries += seq.num_prompt_tokens
                self.counter.cache_hits += seq.num_hit_tokens or 0

    def _recover(self, requests: Iterable[Request]) -> None:
        """Go on with `requests` alone, after an exception or Ctrl-C.

        That may strike anywhere and leave anything half done, so nothing but the sequences' tokens
        is trusted: unfinished ones start over with those that they have. Aborted ones stay so.
        """
        self._generating = False
        self._launched = None
        self._begun.clear()
        known = len(self._requests)
        kept = {r.request_id: r for r in requests if not r.is_aborted}
        self._finished = {i: r for i, r in kept.items() if not r.unfinished}
        self._requests = {i: r for i, r in kept.items() if r.unfinished}
        self.counter.aborted += max(0, known - len(self._requests))
        self._streaming &= kept.keys()
        for seq in (seq for request in kept.values() for seq in request.seqs):
            seq.seen_tokens = None
            if seq.text is not None:
                seq.text.begin()
        self._runner.forget()
        self.scheduler.restart(seq for r in self._requests.values() for seq in r.unfinished)

    def _claim(self, request_ids: list[int]) -> list[RequestOutput]:
        """Hand out the outputs of finished requests."""
        outputs = [self._finished[i].output(self.tokenizer) for i in request_ids]
        for request_id in request_ids:
            self._forget(request_id)
        return outputs

    def _enqueue(self, token_ids: list[int], params: SamplingParams, streams: bool = False) -> int:
        """Queue a request that the intake has found good. Its text is followed if it `streams`."""
        request = self._intake.request(token_ids, params, streams)
        if streams:
            self._streaming.add(request.request_id)
        self._requests[request.request_id] = request
        self.scheduler.add(request.seqs[0])
        return request.request_id

    def _check_open(self) -> None:
        failure = self._runner.failure
        if not self._finalizer.alive:
            reason = f", as {failure}" if failure else ""
            raise RuntimeError(f"this LLM is closed{reason}; make a new one")
        if failure:  # while nothing ran
            self.close()
            self._runner.check()


def start_runner(config: Config, model_config: ModelConfig, path: Path) -> ModelRunner:
    """Rank 0's runner, ready to run, with all other ranks behind it."""
    size = config.tensor_parallel_size
    if size == 1:
        runner = ModelRunner(config, model_config, path)
        runner.start()
        return runner
    workers = Workers(size, config.device)
    close = workers.close
    try:
        with workers.together():
            runner = ModelRunner(config, model_config, path, workers.ranks, workers)
            close = runner.close
            runner.start()
    except BaseException:
        close()
        raise
    return runner
