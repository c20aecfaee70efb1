"""LLMEngine: requests in, outputs out, one step at a time. It owns the scheduler and the runner."""

import os
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from nanovllm.config import Config, ModelName, asked_by
from nanovllm.engine.features import NO_FEATURES, Features
from nanovllm.engine.requests.engine_requests import EngineRequests
from nanovllm.engine.requests.intake import Accepted, Intake
from nanovllm.engine.requests.measures import StepCounter
from nanovllm.engine.requests.request import Request
from nanovllm.engine.requests.tokenizer import load_tokenizer
from nanovllm.engine.run.launched import Begun, Launched
from nanovllm.engine.schedule.scheduler import Scheduler
from nanovllm.engine.start.startup import start_runner
from nanovllm.models.checkpoint import resolve_model
from nanovllm.models.config import ModelConfig
from nanovllm.outputs import EngineStats, RequestOutput
from nanovllm.prompts import Prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import shorten

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nanovllm.engine.errors import NotReadyError
    from nanovllm.engine_options import EngineOptions
    from nanovllm.lora_request import LoRARequest
    from nanovllm.metrics import Metric

T = TypeVar("T")


class LLMEngine:
    """An engine for one model. Options are the fields of `Config`.

    Step by step: `add_request`, then `step` until `is_finished`. Not safe for several threads.
    """

    features: Features = NO_FEATURES
    _warns = True  # whether to warn if the model has no tokenizer

    def __init__(self, model: ModelName = None, **options: "Unpack[EngineOptions]") -> None:
        asked = self.asked = asked_by(self, model, options)
        self.model_path = path = resolve_model(
            asked.model, revision=asked.revision, download_dir=asked.download_dir,
            quantization=asked.quantization,
        )  # fmt: skip
        self.model_config = ModelConfig.from_dir(path, asked.quantization)
        self.model_config.check_parallel_size(
            asked.tensor_parallel_size, asked.enable_expert_parallel
        )
        warns = self._warns and asked.load_format != "dummy"  # random weights
        self.tokenizer = load_tokenizer(
            asked.tokenizer, path, download_dir=asked.download_dir, warns=warns
        )
        parts = self.features.shard_parts(asked, self.model_config, self.tokenizer)
        self.model_runner = start_runner(asked, self.model_config, path, parts)
        self._finalizer = weakref.finalize(self, self.model_runner.close)
        self.config = self.model_runner.config
        shard = self.model_runner.shard
        drafting = self.features.drafting(asked, shard)
        self.adapters = self.features.adapters(self.model_runner)
        self.scheduler = Scheduler(
            self.config, shard.caches.layout, drafting, self.adapters.admission_filter
        )
        self.intake = Intake(
            self.config, self.model_config, self.tokenizer, self.features, self.adapters
        )
        self.eos_token_ids = self.intake.eos_token_ids
        self.counter = StepCounter()
        self.requests = EngineRequests(self.scheduler, self.counter)
        self._generating = False
        self._close_asked = False
        # Calls to make before the device's memory is freed, the last one first.
        self.at_close: list[Callable[[], None]] = [self.adapters.close]
        self.refusal: NotReadyError | None = None  # why no request can be computed now
        self._launched: Launched | None = None  # a step in flight

    __init__.__wrapped__ = Config.__init__  # type: ignore[attr-defined]  # where help looks

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        lora_request: "LoRARequest | None" = None,
    ) -> int:
        """Queue one request and return its id. A bad prompt raises and changes nothing."""
        self.check_open()
        params = SamplingParams() if sampling_params is None else sampling_params
        return self.enqueue(self.intake.accept(prompt, params, lora_request=lora_request))

    def step(self) -> list[RequestOutput]:
        """Run one step; return the outputs of the requests that it finished."""
        self.check_open()
        return self.alone(self._step)

    def _step(self) -> list[RequestOutput]:
        if self.requests.unfinished:
            self.advance()
        return self.requests.claim_all(self.tokenizer)

    def abort_request(self, request_id: int) -> RequestOutput:
        """End an unfinished request, free its blocks, and return what it has generated."""
        self.check_alive()
        if not isinstance(request_id, int) or request_id not in self.requests.unfinished:
            got = shorten(request_id)
            raise ValueError(f"request_id must be that of an unfinished request, got {got}")
        request = self.requests.unfinished[request_id]
        self.alone(self.requests.abort, request)
        return request.output(self.tokenizer)

    def stats(self) -> EngineStats:
        """Counts of what the engine has done and is doing. Costs microseconds."""
        from nanovllm.engine.requests.statistics import engine_stats

        return engine_stats(self.scheduler, self.counter)

    def get_metrics(self) -> "list[Metric]":
        """Counters, gauges and histograms by vLLM's names; see `nanovllm.metrics`."""
        from nanovllm.engine.requests.statistics import engine_metrics

        return engine_metrics(self.requests, self.scheduler, self.config.model)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Running requests keep their blocks. Returns True, as in vLLM."""
        self.check_alive()
        self.scheduler.clear_cache()
        return True

    def is_finished(self) -> bool:
        """Whether all requests have finished, and `step` has no more outputs to return."""
        return self.requests.are_done

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
        from nanovllm.engine.descriptions import COPIED

        raise TypeError(COPIED)

    def __repr__(self) -> str:
        from nanovllm.engine.descriptions import text_of

        return text_of(self)

    def alone(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that adds requests or steps; no other call may do so meanwhile.

        If it raises, requests from before the call stay, and those that it added are removed.
        """
        if self._generating:
            raise RuntimeError("this LLM is generating already; one call at a time")
        self.requests.drop_discarded()
        before = self.requests.all
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

    def discard_requests(self, request_ids: Iterable[int]) -> None:
        """End requests and drop their outputs, finished or not.

        During a call (a garbage-collected iterator may ask for it) the next call does it.
        """
        self.requests.discard(request_ids)
        if self._finalizer.alive and not self._generating:
            self.requests.drop_discarded()

    def advance(self) -> None:
        """Complete one step. The requests that it finishes are in `requests`.

        If steps overlap, the next one is begun before this one's tokens are read. Its tokens are
        drawn at once; or, if the draw depends on this step's tokens, when these have been read.
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
        self.requests.complete(batch, finished, end)
        self.counter.add(batch, launched.num_tokens, end - start)

    def _begin(self) -> Begun | None:
        """Begin the next step, if there is one."""
        now = time.perf_counter()
        batch = self.scheduler.schedule()
        self.requests.fail(self.adapters.failures(), "lora_request")
        if batch is None:
            return None
        if batch.is_prefill:
            self.requests.begin(batch, now)
        return self.model_runner.begin(batch)

    def _draw(self, begun: Begun | None) -> Launched | None:
        """Draw the tokens of a step that was begun, if there is one."""
        if begun is None:
            return None
        launched = self.model_runner.draw(begun)
        self.scheduler.advance(begun.batch)
        return launched

    def recover(self, requests: Iterable[Request]) -> None:
        """Go on with these `requests` only, after an exception or Ctrl-C.

        Anything may be half done, so only the sequences' tokens are trusted: unfinished sequences
        start over with the tokens that they have.
        """
        self._generating = False
        self._launched = None
        self.requests.keep_only(requests)
        self.model_runner.recover()
        self.adapters.reset()
        self.scheduler.restart(
            seq for request in self.requests.unfinished.values() for seq in request.unfinished
        )

    def enqueue(self, accepted: Accepted, streams: bool = False) -> int:
        """Queue a prompt that the intake has accepted, and return the request's id.

        A request that `streams` has its text followed, and `step` does not return its output.
        """
        request = self.intake.request(accepted, streams)
        seq = request.seqs[0]
        self.requests.add(request, streams)
        self.features.prepare(seq, self.asked, self.scheduler, self.model_runner)
        self.scheduler.add(seq)
        return request.request_id

    @property
    def is_open(self) -> bool:
        """Whether `close` has not been called."""
        return self._finalizer.alive

    def check_open(self) -> None:
        """Raise if no request can be computed: see `check_alive`; or the engine sleeps."""
        self.check_alive()
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)  # many calls may raise the same one

    def refuse(self, reason: "NotReadyError | None") -> None:
        """Compute no requests for this reason, until it is None."""
        self.refusal = reason
        self.adapters.refuse(reason)

    def check_alive(self) -> None:
        """Raise if the engine is closed, if a rank has ended, or in a forked process."""
        if os.getpid() != self.model_runner.owner:  # a forked process lacks the engine's threads
            from nanovllm.engine.descriptions import FORKED

            raise RuntimeError(FORKED)
        failure = self.model_runner.failure
        if not self._finalizer.alive:
            reason = f", as {failure}" if failure else ""
            raise RuntimeError(f"this LLM is closed{reason}; make a new one")
        if failure:  # a rank has ended while nothing ran
            self.close()
            self.model_runner.check()
