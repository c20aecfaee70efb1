"""AsyncLLM: an engine in a process of its own, for many callers in one asyncio event loop."""

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Any
from weakref import proxy

from nanovllm.engine.remote.async_engine import AsyncEngine, params_of
from nanovllm.engine.remote.readers import SMALL, prompt_size
from nanovllm.features import AllFeatures
from nanovllm.lora_request import LoRARequest
from nanovllm.outputs import RequestOutput, StreamEvent
from nanovllm.prompts import Prompt
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.chat.chat_format import ChatFormat, Turn
    from nanovllm.from_vllm.refusals import MakesEngines
    from nanovllm.pooling_params import PoolingParams
    from nanovllm.vectors.async_vectors import AsyncVectors
    from nanovllm.vectors.outputs import (
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from nanovllm.vectors.pooling import Pooling
    from nanovllm.vectors.preparer import Prompts
    from nanovllm.weights.async_weights import AsyncWeights
    from nanovllm.weights.weights import NamedTensors, Running


class AsyncLLM(AsyncEngine):
    """A model, ready to generate for many callers of one event loop.

    `AsyncLLM(model, **options)` takes the options of `LLM`, and blocks until the model is loaded.
    At most `max_waiting` samples wait in addition to those that can run: a call that exceeds this
    raises an EngineFullError. A request waits at most `grammar_seconds` until its
    `structured_outputs` are compiled. Close it, or use it in an `async with` block.
    """

    features = AllFeatures()

    @classmethod
    def from_engine_args(cls, engine_args: "MakesEngines", **others: Any) -> Any:
        """The `AsyncLLMEngine` of vLLM's `AsyncEngineArgs`: its outputs have vLLM's form."""
        from nanovllm.from_vllm.refusals import made_by, refuse_others

        refuse_others("from_engine_args", others, ("usage_context",))
        return made_by(engine_args, "make_async")

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: Any = None,
        *,
        priority: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[StreamEvent]:
        """Complete a prompt, and yield the new part whenever the caller asks for more.

        A slow caller gets several tokens in an event. Leaving the loop, or cancelling the task,
        aborts the request. `request_id` names it for `abort`. `priority` is a field of the
        parameters too; give one of them. `lora_request` is an adapter, which is read while the
        engine's steps go on. A bad prompt or adapter raises at the first event. Parameters with an
        `output_kind` ask for outputs in vLLM's form instead of events.
        """
        asked: Any = dict(request_id=request_id, priority=priority, lora_request=lora_request)
        if getattr(sampling_params, "output_kind", None) is not None:
            from nanovllm.from_vllm.async_outputs import outputs_of

            outputs: Any = outputs_of(self, prompt, sampling_params, **asked)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output
            return
        async with self.request(prompt, sampling_params, **asked) as request:
            async for event in request.events():
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
        async with self.request(prompt, sampling_params, **asked, is_whole=True) as request:
            return await request.output()

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
        params = params_of(sampling_params, priority)
        if options:
            from nanovllm.chat.given_templates import with_template_texts

            options = with_template_texts(self.tokenizer, options)
        turn = await self.chat_turn(messages, params, **options)
        asked: Any = dict(request_id=request_id, lora_request=lora_request)
        readers = [turn.answer.reader() for _ in range(params.n)]
        async with self.request(turn.prompt, turn.params, **asked) as request:
            async for event in request.events():
                ended = event["finish_reason"] is not None
                event["delta"] = readers[event["sample"]].feed(
                    event["text"], ended, event["token_ids"]
                )
                yield event

    async def chat_turn(
        self, messages: list[Any], params: SamplingParams | None = None, **options: Any
    ) -> "Turn":
        """The prompt of a conversation, its parameters, and the reader of its answer."""
        given = params or SamplingParams()
        turns = functools.partial(
            self._chat_format.turns, [messages], lambda number: [given] * number, **options
        )
        size = prompt_size(messages) + SMALL * bool(options)  # such as tools
        self.check()
        (turn,) = await self.readers.run(turns, size)
        return turn

    def unread_fields(self, **options: Any) -> list[str]:
        """The fields among the options of a chat that its template does not take."""
        return self._chat_format.unread_fields(**options)

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a chat template for `chat`."""
        return self._chat_format.has_template

    async def embed(
        self, prompts: "Prompts", *, lora_request: LoRARequest | None = None, **options: Any
    ) -> "list[EmbeddingRequestOutput]":
        """The vectors of prompts; options are those of `LLM.embed`, without a progress bar.

        At most `2 * max_num_seqs` prompts of a call are queued at a time. A bad prompt raises
        before any is queued. If the call is left, or one of its requests aborted, all are aborted.
        """
        return await self._vectors.embed(prompts, lora_request, **options)

    async def encode(
        self,
        prompts: "Prompts",
        pooling: "Pooling | PoolingParams | None" = None,
        *,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> "list[PoolingRequestOutput]":
        """The hidden states of prompts, by the options of `LLM.encode`. Otherwise as `embed`."""
        return await self._vectors.encode(prompts, pooling, lora_request, **options)

    async def score(
        self,
        queries: "Prompts",
        documents: "Prompts",
        *,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> "list[ScoringRequestOutput]":
        """How well documents fit queries, by the options of `LLM.score`. Otherwise as `embed`."""
        return await self._vectors.score(queries, documents, lora_request, **options)

    async def update_weights(
        self, weights: "NamedTensors", *, running: "Running" = "refuse"
    ) -> None:
        """Replace weights, as `LLM.update_weights`.

        The engine's process opens CUDA tensors; other tensors are sent to it, a few at a time. A
        bad tensor is found when it is loaded, also in a list. Another call waits until this one
        ends. If the task is cancelled, its update is given up.
        """
        await self._weights.update_weights(weights, running=running)

    async def reload_weights(self, *, running: "Running" = "refuse") -> None:
        """Load all weights of the checkpoint again."""
        await self._weights.reload_weights(running=running)

    async def get_weights(self, names: str | Iterable[str] | None = None) -> dict[str, Any]:
        """Copies of weights on the host, as `LLM.get_weights`."""
        return await self._weights.get_weights(names)

    async def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call a function with every rank's model, as `LLM.apply_model`."""
        return await self._weights.apply_model(function)

    async def sleep(self, level: int = 1, *, running: "Running" = "refuse") -> None:
        """Free the device's memory until `wake_up`, as `LLM.sleep`."""
        await self._weights.sleep(level, running=running)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Get the memory back that `sleep` freed."""
        await self._weights.wake_up(tags)

    async def is_sleeping(self) -> bool:
        """Whether the engine sleeps: memory is freed until `wake_up`."""
        return await self._weights.is_sleeping()

    # Parts that only some calls need, imported when they are first asked for.

    @functools.cached_property
    def _chat_format(self) -> "ChatFormat":
        from nanovllm.chat.chat_format import ChatFormat

        asked, most = self.asked, self.config.max_model_len
        return ChatFormat(self.tokenizer, asked.tool_parser, asked.reasoning_parser, most)

    @functools.cached_property
    def _vectors(self) -> "AsyncVectors":
        from nanovllm.vectors.async_vectors import AsyncVectors

        return AsyncVectors(proxy(self))

    @functools.cached_property
    def _weights(self) -> "AsyncWeights":
        from nanovllm.weights.async_weights import AsyncWeights

        return AsyncWeights(self.connection)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
