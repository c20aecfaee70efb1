"""AsyncLLM: an engine for asyncio, in a process of its own. Many callers, one engine."""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import os
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nanovllm.chat.answers import AnswerReader
from nanovllm.chat.chat_format import ChatFormat, Turn
from nanovllm.chat.conversation import has_chat_template
from nanovllm.config import MAX_WAITING, Config
from nanovllm.engine.errors import EngineEndedError
from nanovllm.engine.ranks.command import by_value
from nanovllm.engine.remote.call import Call
from nanovllm.engine.remote.connection import Connection
from nanovllm.engine.remote.messages import Drop, Event, Progress, Refused, Stop, Submit, Tokens
from nanovllm.engine.remote.mirror import Mirror
from nanovllm.engine.requests.intake import Accepted, Intake, check_whole
from nanovllm.engine.requests.pool import Pooling
from nanovllm.engine.requests.request import Request
from nanovllm.engine.requests.tokenizer import load_tokenizer
from nanovllm.lora_request import NOT_ENABLED, LoRARequest, check_lora_request
from nanovllm.metrics import Metric
from nanovllm.models.generation_config import recommended_params
from nanovllm.models.loader import resolve_model
from nanovllm.outputs import EngineStats, RequestOutput, StreamEvent
from nanovllm.pooling_params import PoolingParams
from nanovllm.prompts import Prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_int, shorten
from nanovllm.utils.tasks import all_of
from nanovllm.vectors.outputs import (
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from nanovllm.vectors.plans import Planner
from nanovllm.vectors.preparer import Output, Plan, Prompts, check_complete

if TYPE_CHECKING:  # they import PyTorch
    from nanovllm.engine.weights.calls import Running, Weights

T = TypeVar("T")
TENSORS_SENT = 8  # in a message, as they are copied for it
READERS = 2  # threads that tokenize prompts and apply chat templates
# Characters or token ids of a prompt. Changing threads takes longer than reading a small one; a
# large one waits for a thread of its own, not others for it.
SMALL, LARGE = 1 << 11, 1 << 17
MESSAGE, PROMPT = 64, 8  # what a message, or a prompt of several, takes beside its text


class EngineFullError(RuntimeError):
    """As many requests wait as may wait."""


class AsyncLLM:
    """A model, ready to generate for many callers of one event loop.

    `AsyncLLM(model, **options)` takes the options of `LLM`, and blocks until the model is loaded.
    At most `max_waiting` samples wait beside those that can run: a call beyond is an
    EngineFullError. Close it, or use it in an `async with` block.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, max_waiting: int = MAX_WAITING, **options: Any
    ) -> None:
        asked = Config(model=model, **options)  # type: ignore[arg-type]
        self.max_waiting = check_int("max_waiting", max_waiting, 0)
        self.num_open = 0  # samples that callers wait for
        self.model_path = path = resolve_model(
            asked.model, revision=asked.revision, download_dir=asked.download_dir
        )
        self._calls: dict[int, Call] = {}
        self._connection = Connection(asked.model, options, self._take, self._end_calls)
        try:
            has_meaning = asked.load_format != "dummy"
            self.tokenizer = load_tokenizer(
                asked.tokenizer, path, download_dir=asked.download_dir, warns=has_meaning
            )
            self.config, self.model_config = self._connection.wait_until_ready()
        except BaseException:
            self._connection.process.close()
            raise
        self._intake = Intake(self.config, self.model_config, self.tokenizer)
        self._planner = Planner(self._intake, self.model_config, path, str(asked.model))
        self._chat_format = ChatFormat(self.tokenizer, asked.tool_parser, asked.reasoning_parser)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="nanovllm-read")
        self._large_reader = ThreadPoolExecutor(1, thread_name_prefix="nanovllm-read-large")
        self._numbers = itertools.count()
        self._updating = asyncio.Lock()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: Any = None,
        priority: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[StreamEvent]:
        """Complete a prompt, and yield what is new whenever the caller asks for more.

        A slow caller gets several tokens in an event. Leaving the loop, or cancelling the task,
        aborts the request. `request_id` names it for `abort`, and `priority` replaces that of the
        parameters. `lora_request` is an adapter, which is read beside the engine's steps. A bad
        prompt or adapter raises at the first event.
        """
        asked: Any = dict(request_id=request_id, priority=priority, lora_request=lora_request)
        async with self.request(prompt, sampling_params, **asked) as call:
            async for event in call.events():
                yield event

    async def chat(
        self,
        messages: list[Any],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: Any = None,
        priority: int | None = None,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> AsyncIterator[StreamEvent]:
        """Answer a conversation; each event has a `delta`, as those of `LLM.stream_chat`.

        Options are the keywords of `LLM.chat`. Otherwise as `generate`.
        """
        params = _params(sampling_params, priority)
        turn = await self.chat_turn(messages, params, **options)
        readers = [AnswerReader(turn.answer) for _ in range(params.n)]
        asked: Any = dict(request_id=request_id, lora_request=lora_request)
        events = self.generate(turn.prompt, turn.params, **asked)
        async with contextlib.aclosing(events):  # type: ignore[type-var]
            async for event in events:
                ended = event["finish_reason"] is not None
                event["delta"] = readers[event["sample"]].feed(event["text"], ended)
                yield event

    async def complete(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: Any = None,
        priority: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        """Complete a prompt, and return the whole output. Otherwise as `generate`."""
        asked: Any = dict(request_id=request_id, priority=priority, lora_request=lora_request)
        async with self.request(prompt, sampling_params, **asked, is_whole=True) as call:
            return await call.output()

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
        params = _params(sampling_params, priority)
        self._check_adapter(lora_request)
        if not is_whole:
            check_whole(params)
        _pickled(params)
        self._check_room(params.n)
        accept = functools.partial(self._intake.accept, prompt, _unconstrained(params))
        accepted = await self._read(accept, prompt_size(prompt) + _params_size(params))
        async with self._running(accepted, params, request_id, is_whole, lora_request) as call:
            yield call

    @contextlib.asynccontextmanager
    async def _running(
        self,
        accepted: Accepted,
        params: SamplingParams,
        name: Any = None,
        is_whole: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[Call]:
        """Queue what was accepted for the time of the block."""
        await self._connection.open()
        call = self._open(accepted, params, name, is_whole, lora_request)
        try:
            yield call
        finally:
            if not call.is_over:
                self._drop(call)
            del self._calls[call.number]
            self._count(call, 0)

    async def embed(
        self, prompts: Prompts, *, lora_request: LoRARequest | None = None, **options: Any
    ) -> list[EmbeddingRequestOutput]:
        """The vectors of prompts; options are those of `LLM.embed`, without a progress bar.

        As many prompts of a call are queued at once as sequences may run. A bad prompt raises
        before any is queued. Leaving the call, or aborting one of its requests, aborts them all.
        """
        plan = functools.partial(self._planner.embed, prompts, **options)
        return await self._carry_out(plan, _all_size(prompts), lora_request)

    async def encode(
        self,
        prompts: Prompts,
        pooling: Pooling | PoolingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput]:
        """The hidden states of prompts, by the options of `LLM.encode`. Otherwise as `embed`."""
        plan = functools.partial(self._planner.encode, prompts, pooling, **options)
        return await self._carry_out(plan, _all_size(prompts), lora_request)

    async def score(
        self,
        queries: Prompts,
        documents: Prompts,
        *,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """How well documents fit queries, by the options of `LLM.score`. Otherwise as `embed`."""
        plan = functools.partial(self._planner.score, queries, documents, **options)
        most = len(documents) if isinstance(documents, list | tuple) else 1
        size = _all_size(queries) * most + _all_size(documents)  # a query with each document
        return await self._carry_out(plan, size, lora_request)

    async def _carry_out(
        self, make: Callable[[], Plan[Output]], size: int, lora_request: LoRARequest | None
    ) -> list[Output]:
        """Make a plan of prompts of this size, compute its requests, and return its outputs."""
        self._check_adapter(lora_request)
        plan = await self._read(make, size)
        room = asyncio.Semaphore(self.config.max_num_seqs)

        async def compute(accepted: Accepted) -> Request:
            asked = self._running(accepted, accepted.params, lora_request=lora_request)
            async with room, asked as call:
                request = await call.request()
            check_complete(request)  # if it is not, the others are cancelled
            return request

        return plan.outputs(await all_of(map(compute, plan.accepted)))

    async def chat_turn(
        self, messages: list[Any], params: SamplingParams | None = None, **options: Any
    ) -> Turn:
        """The prompt of a conversation, its parameters, and how the answer is read."""
        given = params or SamplingParams()
        turns = functools.partial(
            self._chat_format.turns, [messages], lambda number: [given] * number, **options
        )
        size = prompt_size(messages) + SMALL * bool(options)  # such as tools
        (turn,) = await self._read(turns, size)
        return turn

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a chat template for `chat`."""
        return has_chat_template(self.tokenizer)

    async def abort(self, request_id: Any) -> None:
        """End the request of this name; its caller gets a last event, with "abort"."""
        self.check()
        call = next((call for call in self._calls.values() if call.name == request_id), None)
        if call is None:
            raise ValueError(f"request_id must be that of a request, got {shorten(request_id)}")
        self._drop(call)

    def end_all(self, error: BaseException) -> None:
        """End all requests; their callers get this error."""
        for call in self._calls.values():
            if not call.is_over:
                self._drop(call, error)

    async def stats(self) -> EngineStats:
        """Counts of what the engine has done and is doing."""
        stats: EngineStats = await self._connection.ask("stats")
        return stats

    async def get_metrics(self) -> list[Metric]:
        """The metrics of `LLM.get_metrics`."""
        metrics: list[Metric] = await self._connection.ask("get_metrics")
        return metrics

    async def update_weights(self, weights: "Weights", *, running: "Running" = "refuse") -> None:
        """Replace weights, as `LLM.update_weights`.

        CUDA tensors are opened by the engine's process; others are sent to it, a few at a time.
        What is wrong with a tensor is found when it is loaded, also in a list. Another call waits
        for the end of this one. A task that is cancelled gives its update up.
        """
        from nanovllm.engine.weights.update import pairs, sendable_weight

        items = iter(pairs(weights))
        async with self._updating:
            try:
                await self._connection.ask("begin_update", running)
                while part := list(itertools.islice(items, TENSORS_SENT)):
                    sent = [sendable_weight(one) for one in part]
                    await self._connection.ask("load_weights", sent)
                await self._connection.ask("end_update")
            except BaseException:
                self._connection.tell("cancel_update")
                raise

    async def reload_weights(self, *, running: "Running" = "refuse") -> None:
        """Load all weights of the checkpoint again."""
        await self._connection.ask("reload_weights", running=running)

    async def get_weights(self, names: str | Iterable[str] | None = None) -> dict[str, Any]:
        """Copies of weights on the host, as `LLM.get_weights`."""
        listed = names if names is None or isinstance(names, str) else list(names)
        weights: dict[str, Any] = await self._connection.ask("get_weights", listed)
        return weights

    async def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call a function with every rank's model, as `LLM.apply_model`."""
        results: list[Any] = await self._connection.ask("apply_model", function)
        return results

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache."""
        done: bool = await self._connection.ask("reset_prefix_cache")
        return done

    async def sleep(self, level: int = 1, *, running: "Running" = "refuse") -> None:
        """Free the device's memory until `wake_up`, as `LLM.sleep`."""
        await self._connection.ask("sleep", level, running=running)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Get the memory back that `sleep` freed."""
        await self._connection.ask("wake_up", tags)

    async def is_sleeping(self) -> bool:
        """Whether memory is freed that `wake_up` gets back."""
        sleeps: bool = await self._connection.ask("get_is_sleeping")
        return sleeps

    async def start_profile(self) -> None:
        """Begin to record what the engine does, as `LLM.start_profile`."""
        await self._connection.ask("start_profile")

    async def stop_profile(self) -> list[Path]:
        """End the recording; returns the traces."""
        paths: list[Path] = await self._connection.ask("stop_profile")
        return paths

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

    async def ping(self, seconds: float) -> None:
        """Raise an asyncio.TimeoutError if the engine's process has not answered for this long.

        It answers between two steps.
        """
        await self._connection.ping(seconds)

    def close(self) -> None:
        """End the engine after its step, and free what it used. Idempotent.

        Calls that still wait get a RuntimeError. It blocks for the time of a step or two, and is
        for the event loop's thread, or when that has ended.
        """
        self._disconnect()
        self._connection.process.close()

    def _disconnect(self) -> None:
        """End all calls, and listen no more."""
        self._connection.disconnect(EngineEndedError("this AsyncLLM is closed; make a new one"))
        for threads in (self._readers, self._large_reader):
            threads.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """`close`, without blocking the event loop."""
        self._disconnect()
        await asyncio.to_thread(self._connection.process.close)

    async def _read(self, read: Callable[[], T], size: int) -> T:
        """Run what takes long for long prompts, and for those beside the event loop."""
        self.check()
        if size < SMALL:
            return read()
        threads = self._readers if size < LARGE else self._large_reader
        return await asyncio.get_running_loop().run_in_executor(threads, read)

    def _open(
        self,
        accepted: Accepted,
        params: SamplingParams,
        name: Any,
        is_whole: bool,
        lora_request: LoRARequest | None,
    ) -> Call:
        """Queue a request."""
        self.check()
        self._check_room(params.n)
        number = next(self._numbers)
        if name is None:
            name = f"request-{number}"
        elif any(call.name == name for call in self._calls.values()):
            raise ValueError(f"request_id {shorten(name)} is that of another request")
        mirror = Mirror(self._intake.request(accepted, streams=not is_whole), self.tokenizer)
        token_ids = array("i", accepted.token_ids).tobytes()
        calls = _pickled(params)
        if params.stop is not None or calls is not None:  # stops are found here
            params = dataclasses.replace(params, stop=None, logits_processors=None)
        message = Submit(number, token_ids, params, accepted.wanted, lora_request, calls)
        self._connection.send(message)
        call = self._calls[number] = Call(number, name, mirror, is_whole)
        self.num_open += call.num_open
        return call

    def _count(self, call: Call, num_open: int) -> None:
        """Samples of a call have ended: so many are left."""
        self.num_open += num_open - call.num_open
        call.num_open = num_open

    def _check_room(self, num_samples: int) -> None:
        most = self.config.max_num_seqs + self.max_waiting
        if num_samples > most:
            raise ValueError(f"n must be at most {most} (max_num_seqs and max_waiting)")
        if self.num_open + num_samples > most:
            raise EngineFullError(
                f"{self.num_open} samples run or wait, and at most {most} may (max_num_seqs="
                f"{self.config.max_num_seqs}, max_waiting={self.max_waiting}); try again later"
            )

    def _drop(self, call: Call, error: BaseException | None = None) -> None:
        """End a request here and in the engine."""
        with contextlib.suppress(RuntimeError, OSError):
            self._connection.send(Drop(call.number))
        for seq in call.mirror.request.unfinished:
            seq.finish("abort")
        self._count(call, 0)
        call.end(error)

    def _take(self, event: Event) -> None:
        """Pass an event on to the calls that it is for, if they still wait."""
        if isinstance(event, Tokens):
            for number, sample, token_id in zip(*event, strict=True):
                if (call := self._calls.get(number)) is not None and not call.is_over:
                    if call.mirror.add(sample, token_id):
                        self._stop(call, sample)
                    call.note_news()
        elif (call := self._calls.get(event.number)) is None or call.is_over:
            return
        elif isinstance(event, Progress):
            if call.mirror.apply(event):
                self._stop(call, event.sample)
            elif event.reason is not None:
                self._count(call, len(call.mirror.request.unfinished))
            call.note_news()
        elif isinstance(event, Refused):
            call.end(event.error)
        else:
            call.mirror.end(event)
            call.end()

    def _stop(self, call: Call, sample: int) -> None:
        """A stop was found in a sample's text, of which the engine does not know."""
        self._connection.send(Stop(call.number, sample))
        self._count(call, len(call.mirror.request.unfinished))

    def _end_calls(self, failure: BaseException) -> None:
        """No call goes on: the engine has ended."""
        for call in self._calls.values():
            call.end(failure)


def prompt_size(prompt: Any) -> int:
    """The token ids of a prompt, or the characters of its text or of a conversation's messages.

    A message, or a part of one, counts as `MESSAGE` more, and one with calls as a large prompt.
    """
    if isinstance(prompt, Mapping):
        parts = ("prompt", "prompt_token_ids", "content", "text")
        calls = SMALL if prompt.get("tool_calls") else 0
        return sum(prompt_size(prompt.get(name)) for name in parts) + calls
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
        return sum(MESSAGE + prompt_size(part) for part in prompt)
    return len(prompt) if hasattr(prompt, "__len__") else 0


def _all_size(prompts: Any) -> int:
    """The size of one prompt or several, and of what each costs beside its text."""
    texts = prompts if isinstance(prompts, list | tuple) else [prompts]
    return sum(PROMPT + prompt_size(text) for text in texts)


def _params_size(params: SamplingParams) -> int:
    """Bad words are tokenized, which does not count as small."""
    return SMALL if params.bad_words else 0


def _params(given: Any, priority: int | None) -> SamplingParams:
    params = SamplingParams() if given is None else given
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be a SamplingParams, got {shorten(params)}")
    return params if priority is None else dataclasses.replace(params, priority=priority)


def _pickled(params: SamplingParams) -> bytes | None:
    """The callables of a request, for the engine's process; a ValueError if they do not travel."""
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


def _unconstrained(params: SamplingParams) -> SamplingParams:
    """The parameters without a constraint, which the engine's process compiles."""
    if params.structured_outputs is None:
        return params
    return dataclasses.replace(params, structured_outputs=None)
