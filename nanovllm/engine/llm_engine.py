"""LLMEngine: requests in, outputs out, one step at a time. It owns the scheduler and the runner."""

import functools
import os
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

from nanovllm.config import Config
from nanovllm.engine.errors import NotReadyError
from nanovllm.engine.features import NO_FEATURES, Features
from nanovllm.engine.requests.intake import Accepted, Intake
from nanovllm.engine.requests.parts import Wanted
from nanovllm.engine.requests.request import Request
from nanovllm.engine.requests.tokenizer import load_tokenizer
from nanovllm.engine.run.launched import Begun, Launched
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.scheduler import Scheduler
from nanovllm.engine.start.startup import start_runner
from nanovllm.engine.step_counter import StepCounter
from nanovllm.lora_request import LoRARequest, LoRARequests, lora_requests
from nanovllm.metrics import Metric, RequestMeter
from nanovllm.models.checkpoint import resolve_model
from nanovllm.models.config import ModelConfig
from nanovllm.outputs import EngineStats, RequestOutput
from nanovllm.prompts import Prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import shorten

T = TypeVar("T")


def exclusive(method: Callable[..., T]) -> Callable[..., T]:
    """Make a method run by `LLMEngine.alone`: an engine's, or that of a part with an `engine`."""

    @functools.wraps(method)
    def run(self: Any, *args: Any) -> T:
        engine: LLMEngine = getattr(self, "engine", self)
        return engine.alone(method, self, *args)

    return run


class LLMEngine:
    """An engine for one model. Options are the fields of `Config`.

    Step by step: `add_request`, then `step` until `is_finished`. Not safe for several threads.
    Requests are in `unfinished`, and then in `finished` until their output is returned.
    """

    features: Features = NO_FEATURES
    _warns = True  # if the model has no tokenizer

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        asked = self.asked = Config(model=model, **options)  # type: ignore[arg-type]
        self.model_path = path = resolve_model(
            asked.model, revision=asked.revision, download_dir=asked.download_dir
        )
        self.model_config = ModelConfig.from_dir(path, asked.quantization)
        self.model_config.check_parallel_size(
            asked.tensor_parallel_size, asked.enable_expert_parallel
        )
        warns = self._warns and asked.load_format != "dummy"  # which generates no text to read
        self.tokenizer = load_tokenizer(
            asked.tokenizer, path, download_dir=asked.download_dir, warns=warns
        )
        parts = self.features.shard_parts(asked, self.model_config, self.tokenizer)
        self.model_runner = start_runner(asked, self.model_config, path, parts)
        self._finalizer = weakref.finalize(self, self.model_runner.close)
        self.config = self.model_runner.config
        shard = self.model_runner.shard
        drafting = self.features.drafting(asked, shard)
        self._forces = asked.speculative_config is not None  # or a request has asked for it
        self.adapters = self.features.adapters(self.model_runner)
        self.scheduler = Scheduler(
            self.config, shard.caches.layout, drafting, self.adapters.admissions
        )
        self.counter = StepCounter()
        self.meter = RequestMeter()
        self.intake = Intake(self.config, self.model_config, self.tokenizer, self.features)
        self.eos_token_ids = self.intake.eos_token_ids
        self.unfinished: dict[int, Request] = {}
        self.finished: dict[int, Request] = {}
        self._discarded: set[int] = set()
        self._streaming: set[int] = set()  # requests whose output an iterator returns
        self._generating = False
        self._close_asked = False
        # What is run before the device's memory is freed, the last one first.
        self.at_close: list[Callable[[], None]] = [self.adapters.close]
        self.refusal: NotReadyError | None = None  # why no request can be computed now
        self._begun: dict[int, Request] = {}  # scheduled, without a first token yet
        self._launched: Launched | None = None  # a step in flight

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> int:
        """Queue one request and return its id. A bad prompt raises and changes nothing."""
        self.check_open()
        params = SamplingParams() if sampling_params is None else sampling_params
        return self.enqueue(self.accept(prompt, params, lora_request=lora_request))

    def step(self) -> list[RequestOutput]:
        """Run one step; return the outputs of the requests that it finished."""
        self.check_open()
        return self._step_and_claim()

    def abort_request(self, request_id: int) -> RequestOutput:
        """End an unfinished request, free its blocks, and return what it has generated."""
        self.check_alive()
        if not isinstance(request_id, int) or request_id not in self.unfinished:
            got = shorten(request_id)
            raise ValueError(f"request_id must be that of an unfinished request, got {got}")
        return self._abort(self.unfinished[request_id])

    def stats(self) -> EngineStats:
        """Counts of what the engine has done and is doing. Costs microseconds."""
        scheduler, counter = self.scheduler, self.counter
        return EngineStats(
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_finished=counter.finished,
            num_aborted=counter.aborted,
            num_preemptions=scheduler.num_preemptions,
            prefill_tokens=counter.prefill_tokens,
            decode_tokens=counter.decode_tokens,
            drafted_tokens=counter.drafted_tokens,
            accepted_tokens=counter.accepted_tokens,
            prefix_cache_queries=counter.cache_queries,
            prefix_cache_hits=counter.cache_hits,
            **scheduler.caches.counts(),
        )

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and histograms by vLLM's names; see `nanovllm.metrics`."""
        drafts = self.scheduler.drafting.metrics(self.config.model)
        running_tokens = sum(sum(r.nums_generated) for r in self.unfinished.values())
        return self.meter.metrics(self.stats(), running_tokens, self.config.model) + drafts

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Running requests keep their blocks. Returns True, as in vLLM."""
        self.check_alive()
        self.scheduler.clear_cache()
        return True

    def is_finished(self) -> bool:
        """Whether all requests have finished, and `step` has returned all that it returns."""
        return not self.unfinished and self.finished.keys() <= self._streaming

    def close(self) -> None:
        """Free the device's memory and end the other ranks. Idempotent.

        Also done when the engine is garbage collected and when Python exits. During a call (from a
        signal handler or another thread) it ends that call after the step. In a forked process it
        does nothing: the device's memory and the ranks belong to the process that made the engine.
        """
        if self._generating:
            self._close_asked = True
            return
        self._launched = None
        while self.at_close:
            self.at_close.pop()()
        self._finalizer()

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled."""
        raise TypeError(
            "an LLM cannot be copied or pickled: it has a device's memory, and processes; pass the"
            " model's name and the options, and make an LLM in each process"
        )

    def __repr__(self) -> str:
        config = self.config
        ranks = f" {config.tensor_parallel_size} ranks," if config.tensor_parallel_size > 1 else ""
        caches = self.scheduler.caches
        states = f", {caches.states.num_slots} slots for states" if caches.states else ""
        return (
            f"{type(self).__name__}({config.model!r}, device={config.device!r},"
            f" dtype={config.dtype!r}, attention_backend={config.attention_backend!r},{ranks}"
            f" {caches.blocks.num_blocks} KV blocks of {config.kvcache_block_size} tokens{states})"
        )

    def alone(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that adds requests or steps; no other call may do so meanwhile.

        If it raises, requests from before the call stay, and those that it added are removed.
        """
        if self._generating:
            raise RuntimeError("this LLM is generating already; one call at a time")
        self._drop_discarded()
        before = [*self.unfinished.values(), *self.finished.values()]
        try:
            self._generating = True
            result = function(*args)
            self._generating = False
        except BaseException:
            self.recover(before)
            if self.model_runner.failure is not None or self._close_asked:
                self.close()
            raise
        if self._close_asked:
            self.close()
        return result

    @exclusive
    def run_step(self) -> None:
        """Run one step; its tokens and ends are in the requests. Outputs are not made."""
        self.advance()

    @exclusive
    def stop_sample(self, request: Request, index: int) -> None:
        """End a sample whose caller has found a stop in its text."""
        seq = request.seqs[index]
        self.scheduler.abort(seq)
        seq.finish_reason = "stop"
        self._finish(request, time.perf_counter())

    @exclusive
    def _step_and_claim(self) -> list[RequestOutput]:
        if self.unfinished:
            self.advance()
        return self.claim([i for i in self.finished if i not in self._streaming])

    @exclusive
    def _abort(self, request: Request) -> RequestOutput:
        self.end(request)
        del self.unfinished[request.request_id]
        return request.output(self.tokenizer)

    def end(self, request: Request) -> None:
        """Abort what a request has not finished, and count it."""
        self.scheduler.abort(*request.unfinished)
        self._begun.pop(request.request_id, None)
        request.times.ended = time.perf_counter()
        self.counter.aborted += 1
        request.measure(self.meter)

    def discard_requests(self, request_ids: Iterable[int]) -> None:
        """End requests and drop their outputs, finished or not.

        During a call (a collected iterator may ask for it) this is left to the next one.
        """
        self._discarded.update(request_ids)
        if self._finalizer.alive and not self._generating:
            self._drop_discarded()

    def _drop_discarded(self) -> None:
        while self._discarded:
            request_id = self._discarded.pop()
            if (request := self.unfinished.pop(request_id, None)) is not None:
                self.end(request)
            self.drop_output(request_id)

    def drop_output(self, request_id: int) -> None:
        """Drop the output of a finished request, which has been returned or is not wanted."""
        self.finished.pop(request_id, None)
        self._streaming.discard(request_id)

    def advance(self) -> None:
        """Complete one step; requests that it finishes go to `finished`.

        If steps overlap, the next one is begun before this one's tokens are read. Its draw follows
        at once, or if that depends on these tokens, when they have been read.
        """
        if self._close_asked:
            raise RuntimeError("this LLM was closed in the middle of the call; make a new one")
        start = time.perf_counter()
        launched = self._launched or self._draw(self._begin())
        self._launched = following = None
        if launched is None:
            self.adapters.wait()
            return
        batch = launched.batch
        if self.config.overlap and not self.scheduler.must_wait(batch):
            following = self._begin()
            if following is not None and not following.batch.draws_wait:
                self._launched, following = self._draw(following), None
        token_ids = self.model_runner.wait(launched)
        finished = self.scheduler.postprocess(batch, token_ids)
        if following is not None:
            self._launched = self._draw(following)
        end = time.perf_counter()
        if self._begun:
            for seq in batch.sampling_seqs:
                if (request := self._begun.pop(seq.request_id, None)) is not None:
                    request.times.first_token = end
                    self.meter.begin(end - request.times.arrived)
        for request_id in dict.fromkeys(seq.request_id for seq in finished):
            self._finish(self.unfinished[request_id], end)
        self.counter.add(batch, launched.num_tokens, end - start)

    def _finish(self, request: Request, end: float) -> None:
        """Count a request, if all its samples have ended."""
        if request.unfinished:
            return
        request.times.ended = end
        self._begun.pop(request.request_id, None)  # without a first token
        self.counter.finished += 1
        self.finished[request.request_id] = request
        del self.unfinished[request.request_id]
        request.measure(self.meter)

    def _begin(self) -> Begun | None:
        """Begin the next step, if there is one."""
        now = time.perf_counter()
        batch = self.scheduler.schedule()
        self._end_failed()
        if batch is None:
            return None
        if batch.is_prefill:
            self._note_admissions(batch, now)
        return self.model_runner.begin(batch)

    def _end_failed(self) -> None:
        """End requests whose adapters cannot be read again, each with an error."""
        for request_id, error in self.adapters.failures().items():
            request = self.unfinished[request_id]
            unfinished = request.unfinished
            self.scheduler.abort(*unfinished)
            for seq in unfinished:
                seq.finish_reason, seq.stop_reason = "error", f"lora_request: {error}"
            self._finish(request, time.perf_counter())

    def _draw(self, begun: Begun | None) -> Launched | None:
        """Draw the tokens of a step that was begun, if there is one."""
        if begun is None:
            return None
        launched = self.model_runner.draw(begun)
        self.scheduler.advance(begun.batch)
        return launched

    def _note_admissions(self, batch: Batch, now: float) -> None:
        for seq in batch.seqs:
            request = self.unfinished[seq.request_id]
            if request.times.first_token is None:
                self._begun[seq.request_id] = request
            if request.times.scheduled is None:
                request.times.scheduled = now
                self.counter.cache_queries += seq.num_prompt_tokens
                self.counter.cache_hits += seq.num_hit_tokens or 0

    def recover(self, requests: Iterable[Request]) -> None:
        """Go on with these `requests` only, after an exception or Ctrl-C.

        Anything may be half done, so only the sequences' tokens are trusted: unfinished sequences
        start over with the tokens that they have. Aborted requests stay aborted, and those whose
        output is still to be returned stay finished.
        """
        self._generating = False
        self._launched = None
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
        self.model_runner.recover()
        self.adapters.reset()
        self.scheduler.restart(seq for r in self.unfinished.values() for seq in r.unfinished)

    def claim(self, request_ids: list[int]) -> list[RequestOutput]:
        """The outputs of finished requests, which are then dropped."""
        outputs = [self.finished[i].output(self.tokenizer) for i in request_ids]
        for request_id in request_ids:
            self.drop_output(request_id)
        return outputs

    def accept(
        self,
        prompt: Prompt,
        params: SamplingParams,
        wanted: Wanted | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Accepted:
        """Encode a prompt, read its adapter; raises if one of them does not fit the model."""
        return self.adapters.adapted(self.intake.accept(prompt, params, wanted), lora_request)

    def accept_all(
        self, asked: list[tuple[Prompt, SamplingParams]], lora_request: LoRARequests
    ) -> list[Accepted]:
        """Accept prompts with their parameters; an error names the prompt that it is about."""
        accepted, adapters = [], lora_requests(lora_request, len(asked))
        known: dict[LoRARequest, Any] = {}
        for index, (prompt, params) in enumerate(asked):
            try:
                one = self.intake.accept(prompt, params)
                accepted.append(self.adapters.adapted(one, adapters[index], known))
            except (TypeError, ValueError) as error:
                raise type(error)(f"prompts[{index}]: {error}") from None
        return accepted

    def check_adapter(self, lora_request: LoRARequest) -> None:
        """Read an adapter for requests to come; raises if it does not fit the model."""
        self.adapters.check(lora_request)

    def enqueue(self, accepted: Accepted, streams: bool = False) -> int:
        """Queue what `accept` returned and return its id.

        A request that `streams` has its text followed, and `step` does not return its output.
        """
        request = self.intake.request(accepted, streams)
        if streams:
            self._streaming.add(request.request_id)
        self.unfinished[request.request_id] = request
        if request.seqs[0].parts.keeper is not None and self.model_runner.hidden_reader is None:
            self.model_runner.hidden_reader = self.features.hidden_reader()
        if request.seqs[0].parts.constraint is not None and not self._forces:
            self._forces = True
            self.scheduler.drafting = self.features.forced_drafting(self.model_runner.shard)
        self.scheduler.add(request.seqs[0])
        return request.request_id

    @property
    def is_open(self) -> bool:
        """Whether `close` has not been called."""
        return self._finalizer.alive

    def check_open(self) -> None:
        """Raise if no request can be computed: `check_alive`, or the engine sleeps."""
        self.check_alive()
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)  # many calls may raise the same one

    def refuse(self, reason: NotReadyError | None) -> None:
        """Compute no requests for this reason, and read no adapters; with None, go on."""
        self.refusal = reason
        self.adapters.refuse(reason)

    def check_alive(self) -> None:
        """Raise if the engine is closed, if a rank has ended, or in a forked process."""
        if os.getpid() != self.model_runner.owner:  # its threads are not here
            raise RuntimeError(
                "an LLM cannot be used in a process forked from the one that made it; start that"
                ' process with multiprocessing\'s "spawn" method, and make an LLM in it'
            )
        failure = self.model_runner.failure
        if not self._finalizer.alive:
            reason = f", as {failure}" if failure else ""
            raise RuntimeError(f"this LLM is closed{reason}; make a new one")
        if failure:  # while nothing ran
            self.close()
            self.model_runner.check()
