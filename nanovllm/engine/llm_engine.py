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

import xxhash

from nanovllm.config import Config
from nanovllm.engine.batch import Batch
from nanovllm.engine.device import resolve_device
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.output_text import OutputText
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.workers import Workers
from nanovllm.models.config import ModelConfig
from nanovllm.models.registry import get_model_class
from nanovllm.outputs import EngineStats, RequestOutput, TokenLogprob
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import as_list, check_int, check_text, shorten
from nanovllm.utils.loader import resolve_model
from nanovllm.utils.ranks import Ranks
from nanovllm.utils.tokenizer import load_tokenizer

logger = logging.getLogger("nanovllm")

Prompt = str | Iterable[int]
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

    def add(self, is_prefill: bool, tokens: int, seconds: float) -> None:
        """Book one step."""
        if is_prefill:
            self.prefill_tokens += tokens
            self.prefill_seconds += seconds
        else:
            self.decode_tokens += tokens
            self.decode_seconds += seconds


def exclusive(method: Callable[..., T]) -> Callable[..., T]:
    """Let `method` run alone and as a whole: if it raises, what it began is taken back.

    Requests that were there before it stay; those that it added are gone.
    """

    @functools.wraps(method)
    def run(self: "LLMEngine", *args: Any) -> T:
        if self._generating:
            raise RuntimeError("this LLM is generating already; one call at a time")
        self._drop_abandoned()
        before = [*self._seqs.values(), *self._finished.values()]
        try:
            self._generating = True
            result = method(self, *args)
            self._generating = False
        except BaseException:
            self._recover(before)
            if self._runner.failure is not None:
                self.close()
            raise
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
        get_model_class(self.model_config.architecture)  # refuse before anything is loaded
        self.model_config.check_parallel_size(config.tensor_parallel_size)
        self.tokenizer = load_tokenizer(config.tokenizer, path)
        self._runner = start_runner(config, self.model_config, path)
        self._finalizer = weakref.finalize(self, self._runner.close)
        self.config = self._runner.config
        self.scheduler = Scheduler(self.config)
        self.counter = StepCounter()
        eos_token_ids = set(self.model_config.eos_token_ids)
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            eos_token_ids.add(self.tokenizer.eos_token_id)
        vocab_size = self.model_config.vocab_size
        self.eos_token_ids = frozenset(i for i in eos_token_ids if i < vocab_size)  # that can come
        self._seqs: dict[int, Sequence] = {}
        self._finished: dict[int, Sequence] = {}  # not yet returned to anyone
        self._abandoned: set[int] = set()
        self._streaming: set[int] = set()  # those whose outputs go to an iterator
        self._num_requests = 0
        self._generating = False

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one request and return its id. A bad prompt raises and changes nothing."""
        self._check_open()
        params = SamplingParams() if sampling_params is None else sampling_params
        return self._enqueue(self._encode(prompt, params), params)

    def step(self) -> list[RequestOutput]:
        """Run one step; return the outputs of the requests that it finished."""
        self._check_open()
        return self._step_and_claim()

    def abort_request(self, request_id: int) -> RequestOutput:
        """End an unfinished request, free its blocks, and return what it has generated."""
        self._check_open()
        if request_id not in self._seqs:
            raise ValueError(f"request_id must be that of an unfinished request, got {request_id}")
        return self._abort(self._seqs[request_id])

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
        return not self._seqs and self._finished.keys() <= self._streaming

    def close(self) -> None:
        """Give back the device's memory and end the other ranks. Idempotent.

        Also done when the engine is collected and when Python ends.
        """
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
        if self._seqs:
            self._step()
        return self._claim([i for i in self._finished if i not in self._streaming])

    @exclusive
    def _abort(self, seq: Sequence) -> RequestOutput:
        self.scheduler.abort(seq)
        seq.times.ended = time.perf_counter()
        self.counter.aborted += 1
        del self._seqs[seq.seq_id]
        return self._output(seq)

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
            if (seq := self._seqs.pop(request_id, None)) is not None:
                self.scheduler.abort(seq)
                self.counter.aborted += 1
            self._finished.pop(request_id, None)
            self._streaming.discard(request_id)

    def _step(self) -> None:
        """Run one step; what it finishes goes to `_finished`."""
        start = time.perf_counter()
        batch = self.scheduler.schedule()
        num_tokens = sum(seq.num_scheduled_tokens for seq in batch.seqs)
        if batch.is_prefill:
            self._note_admissions(batch, start)
        finished = self.scheduler.postprocess(batch, self._runner.run(batch))
        end = time.perf_counter()
        if batch.is_prefill:
            for seq in batch.seqs:
                if seq.times.first_token is None and seq.num_tokens > seq.num_prompt_tokens:
                    seq.times.first_token = end
        for seq in finished:
            seq.times.ended = end
            self.counter.finished += 1
            self._finished[seq.seq_id] = seq
            del self._seqs[seq.seq_id]
        self.counter.add(batch.is_prefill, num_tokens, end - start)

    def _note_admissions(self, batch: Batch, now: float) -> None:
        for seq in batch.seqs:
            if seq.times.scheduled is None:
                seq.times.scheduled = now
                self.counter.cache_queries += seq.num_prompt_tokens
                self.counter.cache_hits += seq.num_hit_tokens or 0

    def _recover(self, seqs: Iterable[Sequence]) -> None:
        """Go on with `seqs` alone, after an exception or Ctrl-C.

        That may strike anywhere and leave anything half done, so nothing but the sequences' tokens
        is trusted: unfinished ones start over with those that they have. Aborted ones stay so.
        """
        self._generating = False
        done = {s.seq_id: s for s in seqs if s.status is SequenceStatus.FINISHED}
        known = len(self._seqs)
        self._finished = {i: s for i, s in done.items() if s.finish_reason != "abort"}
        self._seqs = {s.seq_id: s for s in seqs if s.seq_id not in done}
        self.counter.aborted += max(0, known - len(self._seqs))
        self._streaming &= self._seqs.keys() | self._finished.keys()
        for seq in (*self._seqs.values(), *self._finished.values()):
            seq.seen_tokens = None
            if seq.text is not None:
                seq.text.begin()
        self.scheduler.restart(self._seqs.values())

    def _claim(self, request_ids: list[int]) -> list[RequestOutput]:
        """Hand out the outputs of finished requests."""
        outputs = [self._output(self._finished[i]) for i in request_ids]
        for request_id in request_ids:
            del self._finished[request_id]
        self._streaming.difference_update(request_ids)
        return outputs

    def _enqueue(self, token_ids: list[int], params: SamplingParams, streams: bool = False) -> int:
        """Queue a request that `_encode` has found good. Its text is followed if it `streams`."""
        assert self.config.max_model_len is not None
        number = self._num_requests.to_bytes(8, "little")
        seq = Sequence(
            token_ids,
            params,
            eos_token_ids=self.eos_token_ids,
            max_model_len=self.config.max_model_len,
            default_seed=xxhash.xxh64_intdigest(number, seed=self.config.seed),
            bad_words=self._bad_words(params),
            text=OutputText(self.tokenizer, params) if streams or params.stop else None,
        )
        self._num_requests += 1
        if streams:
            self._streaming.add(seq.seq_id)
        self._seqs[seq.seq_id] = seq
        self.scheduler.add(seq)
        return seq.seq_id

    def _encode(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The prompt's token ids, checked together with its parameters."""
        vocab_size, max_model_len = self.model_config.vocab_size, self.config.max_model_len
        assert max_model_len is not None
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be a SamplingParams, got {shorten(params)}")
        self._check_params(params)
        token_ids = self._tokenize(prompt) if isinstance(prompt, str) else as_list("prompt", prompt)
        plain = set(map(type, token_ids)) <= {int}
        if (
            not plain
            or not 0 <= min(token_ids, default=0) <= max(token_ids, default=0) < vocab_size
        ):
            token_ids = [check_int("prompt token id", t, 0, vocab_size - 1) for t in token_ids]
        if not 1 <= len(token_ids) < max_model_len:
            raise ValueError(
                f"prompt must have 1 to {max_model_len - 1} tokens (max_model_len={max_model_len}"
                f" less one to generate), got {len(token_ids)}"
            )
        return token_ids

    def _check_params(self, params: SamplingParams) -> None:
        """Check what depends on the model and its tokenizer."""
        last = self.model_config.vocab_size - 1
        if params.logprobs is not None:
            check_int("logprobs", params.logprobs, 0, last + 1)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                check_int(name, token_id, 0, last)
        for name in ("bad_words", "stop"):
            if getattr(params, name) and self.tokenizer is None:
                raise ValueError(
                    f"{name}: there is no text, as the model directory has no tokenizer; pass"
                    " tokenizer=... when the engine is made"
                )
        if params.allowed_token_ids is not None:
            self._check_allowed(params)

    def _check_allowed(self, params: SamplingParams) -> None:
        """Refuse a list of which nothing may come first."""
        left = set(params.allowed_token_ids or ())
        if params.min_tokens:
            left -= set() if params.ignore_eos else self.eos_token_ids
            left -= set(params.stop_token_ids or ())
        left -= {ids[0] for ids in self._bad_words(params) if len(ids) == 1}
        if not left:
            raise ValueError(
                "allowed_token_ids must hold more than bad_words, and with min_tokens more than"
                f" tokens that stop, got {shorten(params.allowed_token_ids)}"
            )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The token ids of bad words, as the first word of a text and behind another one.

        Those that the model has no row for cannot come.
        """
        texts = (start + word.lstrip(" ") for word in params.bad_words or () for start in ("", " "))
        encoded = (tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        size = self.model_config.vocab_size
        return tuple(dict.fromkeys(ids for ids in encoded if ids and max(ids) < size))

    def _tokenize(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(
                "prompt is text, but the model directory has no tokenizer; pass token ids,"
                " or tokenizer=... when the engine is made"
            )
        check_text("prompt", text)
        token_ids: list[int] = self.tokenizer.encode(text)
        return token_ids

    def _output(self, seq: Sequence) -> RequestOutput:
        assert seq.finish_reason is not None
        token_ids = seq.output_token_ids
        text, reason, stop = "", seq.finish_reason, seq.stop_reason
        if seq.text is not None:
            text = seq.text.finish(seq)
            if seq.text.stop is not None and stop is None and reason != "abort":  # held back
                reason, stop = "stop", seq.text.stop
        elif self.tokenizer is not None:
            skip = seq.params.skip_special_tokens
            text = self.tokenizer.decode(token_ids, skip_special_tokens=skip)
        logprobs = None if seq.params.logprobs is None else self._logprobs(seq)
        return RequestOutput(
            request_id=seq.seq_id,
            text=text,
            token_ids=token_ids,
            finish_reason=reason,
            stop_reason=stop,
            num_prompt_tokens=seq.num_prompt_tokens,
            num_cached_tokens=seq.num_hit_tokens or 0,
            metrics=seq.times.metrics(len(token_ids)),
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else sum(t[0]["logprob"] for t in logprobs),
        )

    def _logprobs(self, seq: Sequence) -> list[list[TokenLogprob]]:
        return [
            [
                TokenLogprob(token_id=i, text=self._token_text(i), logprob=logprob, rank=rank)
                for i, logprob, rank in seq.logprobs[place]
            ]
            for place in range(seq.num_prompt_tokens, seq.num_tokens)
        ]

    def _token_text(self, token_id: int) -> str:
        """A token by itself; half a character is U+FFFD."""
        if self.tokenizer is None:
            return ""
        text: str = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text

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
    resolve_device(config.device, Ranks(0, size))  # refuse before a process is started
    workers = Workers(size)
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
