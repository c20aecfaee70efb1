"""LLM: the facade. Prompts in, texts out, in the order of the prompts."""

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import proxy

from nanovllm.engine.llm_engine import LLMEngine, exclusive
from nanovllm.engine.requests.intake import Accepted, check_whole
from nanovllm.engine.requests.progress import run_until_done
from nanovllm.engine.requests.stream import Stream
from nanovllm.features import AllFeatures
from nanovllm.lora_request import LoRARequest, LoRARequests
from nanovllm.outputs import RequestOutput, StreamEvent
from nanovllm.prompts import Prompt, prompt_list
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_bool, shorten

if TYPE_CHECKING:
    import torch

    from nanovllm.beam_search_params import BeamSearchParams
    from nanovllm.beams.beams import Beams
    from nanovllm.beams.outputs import BeamSearchOutput
    from nanovllm.chat.chat_format import ChatFormat, Turn
    from nanovllm.engine.profile import Profiles
    from nanovllm.pooling_params import PoolingParams
    from nanovllm.vectors.kept_states import Pooling
    from nanovllm.vectors.outputs import (
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from nanovllm.vectors.preparer import Prompts
    from nanovllm.vectors.vectors import Vectors
    from nanovllm.weights.sleep_mode import SleepMode
    from nanovllm.weights.weights import NamedTensors, Running, Weights


class LLM(LLMEngine):
    """A model, ready to generate: `LLM(model, **options)`; `Config` has the options.

    `model` is a local directory or a hub id. Use it in a `with` block, or `close()` it, to free the
    device's memory at once. What only some callers use is in parts, imported at the first call.
    """

    features = AllFeatures()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; return the outputs in the order of the prompts.

        `prompts` is one prompt or a list of them; a prompt is a str, a list of token ids, or a dict
        with `prompt` or `prompt_token_ids`.
        `sampling_params` is None, one for all prompts, or a list with one for each. Everything is
        checked before anything is queued: a bad prompt or parameter raises an error that names its
        index, and changes nothing. If the call is interrupted, its requests are aborted and the
        engine can be used again. `lora_request` is an adapter for all prompts, or a list with one
        or None for each: docs/adapters.md.
        """
        self._check(use_tqdm)
        accepted = self._accept_prompts(prompts, sampling_params, lora_request)
        return self._generate(accepted, use_tqdm)

    def chat(
        self,
        messages: Iterable[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        *,
        tools: list[Any] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        add_generation_prompt: bool = True,
        **chat_template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, which the tokenizer's chat template turns into prompts.

        `messages` is one conversation or a list of them; a conversation is a list of messages,
        `{"role": ..., "content": ...}`. Other keywords go to the template (Qwen3's takes
        `enable_thinking=False`), as does a dict `chat_template_kwargs`, as in vLLM;
        `chat_template=` replaces the tokenizer's. Otherwise as `generate`.

        Each output and sample has a `message`, the answer as OpenAI's API writes it: reasoning is
        `reasoning_content`, calls of `tools` are `tool_calls`. `tool_choice` is "auto", "none",
        "required" or a function, as in OpenAI's API; docs/tools.md explains them.
        """
        self._check(use_tqdm)
        turns = self.chat_turns(
            messages, sampling_params, tools=tools, tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls, add_generation_prompt=add_generation_prompt,
            **chat_template_kwargs,
        )  # fmt: skip
        outputs = self._generate(self._accept_turns(turns, lora_request), use_tqdm)
        for turn, output in zip(turns, outputs, strict=True):
            turn.answer.add_messages(output)
        return outputs

    def stream_chat(
        self,
        messages: Iterable[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequests = None,
        **options: Any,
    ) -> Iterator[StreamEvent]:
        """Answer conversations, and yield new text and tokens as they come.

        Options are the keywords of `chat`. Each event has a `delta`, what is new as OpenAI's API
        writes it: `reasoning_content`, `content`, and `tool_calls` with pieces of their arguments.
        Otherwise as `stream`.
        """
        self.check_open()
        turns = self.chat_turns(messages, sampling_params, **options)
        source = self._stream(self._accept_turns(turns, lora_request))
        return self._stream_turns(turns, source)

    def _stream_turns(
        self, turns: "list[Turn]", source: Generator[StreamEvent, None, None]
    ) -> Generator[StreamEvent, None, None]:
        from nanovllm.chat.answers import AnswerReader

        readers = [[AnswerReader(t.answer) for _ in range(t.params.n)] for t in turns]
        with closing(source) as events:
            for event in events:
                reader = readers[event["index"]][event["sample"]]
                event["delta"] = reader.feed(event["text"], event["finish_reason"] is not None)
                yield event

    def chat_turns(
        self,
        messages: Iterable[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> "list[Turn]":
        """The prompts of `chat`, the parameters of their requests, and how answers are read.

        For `add_request` and `stream`: `turn.answer.message(text)` is the message of an answer.
        """
        params_list = functools.partial(_params_list, sampling_params)
        return self._chat_format.turns(messages, params_list, **options)

    @property
    def _chat_format(self) -> "ChatFormat":
        from nanovllm.chat.chat_format import ChatFormat

        return ChatFormat(self.tokenizer, self.asked.tool_parser, self.asked.reasoning_parser)

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a chat template for `chat`."""
        from nanovllm.chat.conversation import has_chat_template

        return has_chat_template(self.tokenizer)

    def get_tokenizer(self) -> Any:
        """The tokenizer, one of transformers; a ValueError if the model has none."""
        if self.tokenizer is None:
            raise ValueError("the model directory has no tokenizer")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that the model's `generation_config.json` recommends.

        They apply only where they are passed: `generate` without any uses `SamplingParams()`.
        """
        from nanovllm.models.generation_config import recommended_params

        return recommended_params(self.model_path)

    def chat_prompts(self, messages: Iterable[Any], **options: Any) -> list[list[int]]:
        """The token ids of the prompts that `chat` makes."""
        turns = self.chat_turns(messages, **options)
        return [list(turn.prompt["prompt_token_ids"]) for turn in turns]

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequests = None,
    ) -> Iterator[StreamEvent]:
        """Complete every prompt, and yield new text and tokens as they come.

        Prompts and parameters are those of `generate`, and are checked at the call; requests are
        queued when the first event is asked for. Closing the iterator, or dropping it, aborts
        unfinished requests.
        """
        self.check_open()
        return self._stream(self._accept_prompts(prompts, sampling_params, lora_request))

    def _stream(self, accepted: list[Accepted]) -> Generator[StreamEvent, None, None]:
        for one in accepted:
            check_whole(one.params)
        return self._events(accepted)

    def _events(self, accepted: list[Accepted]) -> Generator[StreamEvent, None, None]:
        self.check_open()
        ids = self._enqueue_all(accepted)
        try:
            stream = Stream(ids, [one.params.n for one in accepted], self.tokenizer)
            while stream.open:
                self.check_open()
                yield from self._stream_step(stream)
        finally:
            self.discard_requests(ids)

    @exclusive
    def _enqueue_all(self, accepted: list[Accepted]) -> list[int]:
        return [self.enqueue(one, streams=True) for one in accepted]

    @exclusive
    def _stream_step(self, stream: Stream) -> list[StreamEvent]:
        """The events of a step. If a request finished in another call's step, there is none."""
        if stream.open.keys() <= self.unfinished.keys():
            self.advance()
        events: list[StreamEvent] = []
        for request_id in list(stream.open):
            request = self.unfinished.get(request_id) or self.finished.get(request_id)
            events += stream.events(request_id, request)
            if request_id not in self.unfinished:
                del stream.open[request_id]
                self.drop_output(request_id)
        return events

    @exclusive
    def _generate(self, accepted: list[Accepted], use_tqdm: bool) -> list[RequestOutput]:
        ids = [self.enqueue(one) for one in accepted]
        run_until_done(self, ids, use_tqdm, "Generating")
        return self.claim(ids)

    def _accept_prompts(
        self, prompts: Any, sampling_params: Any, lora_request: Any
    ) -> list[Accepted]:
        """Check and encode all prompts, before anything is queued."""
        items = prompt_list("prompts", prompts)
        params_list = _params_list(sampling_params, len(items))
        return self.accept_all([*zip(items, params_list, strict=True)], lora_request)

    def _accept_turns(self, turns: "list[Turn]", lora_request: Any) -> list[Accepted]:
        return self.accept_all([(turn.prompt, turn.params) for turn in turns], lora_request)

    def embed(
        self,
        prompts: "Prompts",
        *,
        use_tqdm: bool = True,
        dimensions: int | None = None,
        normalize: bool | None = None,
        pooling: "Pooling | None" = None,
        prompt_name: str | None = None,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        pooling_params: "PoolingParams | None" = None,
        lora_request: LoRARequests = None,
        **others: Any,
    ) -> "list[EmbeddingRequestOutput]":
        """The vector of every prompt, in the order of the prompts.

        Prompts are those of `generate`. `pooling` and `normalize` are the model's by default, as
        sentence-transformers' files in its directory say; without these the last token's state is
        normalized. `dimensions` keeps the first ones of a vector, which is then normalized.
        Texts get the model's prompt `prompt_name` in front, or an `instruction` for queries in the
        form of Qwen3-Embedding. `truncate_prompt_tokens` is that of `SamplingParams`,
        and adapters are those of `generate`. `pooling_params` has options in vLLM's form.
        """
        self._check(use_tqdm)
        return self.vectors.embed(
            prompts, use_tqdm, lora_request, dimensions=dimensions, normalize=normalize,
            pooling=pooling, prompt_name=prompt_name, instruction=instruction,
            truncate_prompt_tokens=truncate_prompt_tokens, pooling_params=pooling_params, **others,
        )  # fmt: skip

    def encode(
        self,
        prompts: "Prompts",
        pooling: "Pooling | PoolingParams | None" = None,
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        pooling_params: "PoolingParams | None" = None,
        lora_request: LoRARequests = None,
        **others: Any,
    ) -> "list[PoolingRequestOutput]":
        """The hidden states of every prompt after the final norm, in float32, as they are.

        `pooling` is "last", "cls" (the first token), "mean" or "all"; by default the model's.
        vLLM's order, with a PoolingParams in its place, works too.
        """
        self._check(use_tqdm)
        return self.vectors.encode(
            prompts, pooling, use_tqdm, lora_request, pooling_params=pooling_params,
            truncate_prompt_tokens=truncate_prompt_tokens, **others,
        )  # fmt: skip

    def score(
        self,
        queries: "Prompts",
        documents: "Prompts",
        *,
        instruction: str | None = None,
        method: str | None = None,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        pooling_params: "PoolingParams | None" = None,
        lora_request: LoRARequest | None = None,
        **others: Any,
    ) -> "list[ScoringRequestOutput]":
        """How well documents fit queries, in the order of the documents.

        There is one query for all documents, or one for each. With `method` "yes_no", that of
        Qwen3-Reranker, a score is the probability of "yes" against "no"; with "cosine" it is the
        cosine of two embeddings. By default models that rank, by their files or their name, use the
        first. `instruction` says what the queries ask for. `truncate_prompt_tokens`, that of
        `SamplingParams`, is for cosines. An adapter is used for all of them.
        """
        self._check(use_tqdm)
        return self.vectors.score(
            queries, documents, use_tqdm, lora_request, instruction=instruction, method=method,
            truncate_prompt_tokens=truncate_prompt_tokens, pooling_params=pooling_params, **others,
        )  # fmt: skip

    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: "BeamSearchParams",
        lora_request: LoRARequests = None,
        use_tqdm: bool = False,
        *,
        concurrency_limit: int | None = None,
    ) -> "list[BeamSearchOutput]":
        """The `beam_width` most likely outputs of every prompt, in the order of the prompts.

        Prompts and adapters are those of `generate`. They are found as by transformers' `generate`
        with `num_beams` and without sampling. All prompts are searched at once, or at most
        `concurrency_limit`. Running sequences share the blocks of what they have in common, and
        each step computes what is not cached: with the prefix cache, less than a block of each.
        """
        self._check(use_tqdm)
        return self._beams.search(prompts, params, lora_request, use_tqdm, concurrency_limit)

    def update_weights(self, weights: "NamedTensors", *, running: "Running" = "refuse") -> None:
        """Replace weights by the tensors of an iterable of (name, tensor), or of a dict.

        Names and shapes are those of the checkpoint; an update may have only some of them. Floats
        are converted to the model's type, and quantized again if the engine has quantized them. A
        tensor is on any device, or it is a handle of `torch.multiprocessing`'s `reduce_tensor`.
        A list or a dict is checked before anything changes. Of another iterable, tensors are loaded
        as they come: if it fails in the middle, requests are refused until all weights are updated.

        The prefix cache is emptied. Waiting requests go on with the new weights; if there are
        requests that have begun, `running="refuse"` raises, and "abort" ends them.
        """
        self._weights.update_weights(weights, running=running)

    def begin_update(self, running: "Running" = "refuse") -> None:
        """Begin an update in parts: `load_weights` for each, then `end_update`."""
        self._weights.begin_update(running)

    def load_weights(self, weights: list[tuple[str, Any]]) -> None:
        """Load a part of an update. If it raises, the update is given up, as by `cancel_update`."""
        self._weights.load_weights(weights)

    def end_update(self) -> None:
        """End an update: requests run with the new weights."""
        self._weights.end_update()

    def cancel_update(self) -> None:
        """End an update that cannot be completed, if it has not ended."""
        self._weights.cancel_update()

    def reload_weights(self, *, running: "Running" = "refuse") -> None:
        """Load all weights of the checkpoint again."""
        self._weights.reload_weights(running=running)

    def get_weights(self, names: str | Iterable[str] | None = None) -> "dict[str, torch.Tensor]":
        """Copies of weights on the host, by the checkpoint's names; all of them by default.

        Quantized weights cannot be read.
        """
        return self._weights.get_weights(names)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of all tensors that an update may have, with nothing fused."""
        return self._weights.weight_shapes()

    def apply_model(self, function: "Callable[[torch.nn.Module], Any]") -> list[Any]:
        """Call a function with every rank's model, a `torch.nn.Module`; rank 0's result is first.

        Layers are bound: a linear layer has its weight in `matrix`, in the layout of the kernels,
        and q, k and v, or gate and up, are one layer. Norms and the embedding are parameters. After
        a function that changes weights, call `reset_prefix_cache`. With several ranks, functions of
        the caller's script need the package cloudpickle.
        """
        return self._weights.apply_model(function)

    def sleep(self, level: int = 1, *, running: "Running" = "refuse") -> None:
        """Free the device's memory for others, until `wake_up`.

        Level 1 moves the weights to the host, where they already are on a CPU, and frees the KV
        pool. Level 2 drops the weights, too. Requests are refused meanwhile; those that wait go on
        afterwards. The engine needs `enable_sleep_mode=True`. If the host has no memory for the
        weights, this raises, and the engine stays awake.
        """
        self._sleep_mode.sleep(level, running=running)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Get the memory back that `sleep` freed: "weights" or "kv_cache", or all by default.

        Weights that level 2 has dropped are loaded from the checkpoint if a call without `tags`
        gets their memory back. After `wake_up(["weights"])`, `update_weights` must provide them.
        """
        self._sleep_mode.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """Whether memory is freed that `wake_up` gets back."""
        return self._sleep_mode.is_sleeping

    def start_profile(self) -> None:
        """Begin to record what all ranks do, on host and device. It makes steps slower."""
        self._profiles.start()

    def stop_profile(self) -> list[Path]:
        """End the recording; returns the trace of each rank, for Perfetto or chrome://tracing."""
        return self._profiles.stop()

    # The parts refer weakly to their LLM, so that `del llm` closes it.

    @functools.cached_property
    def vectors(self) -> "Vectors":
        from nanovllm.vectors.vectors import Vectors

        return Vectors(proxy(self))

    @functools.cached_property
    def _beams(self) -> "Beams":
        from nanovllm.beams.beams import Beams

        return Beams(proxy(self))

    @functools.cached_property
    def _weights(self) -> "Weights":
        from nanovllm.weights.weights import Weights

        return Weights(proxy(self))

    @functools.cached_property
    def _sleep_mode(self) -> "SleepMode":
        from nanovllm.weights.sleep_mode import SleepMode

        return SleepMode(self._weights)

    @functools.cached_property
    def _profiles(self) -> "Profiles":
        from nanovllm.engine.profile import Profiles

        return Profiles(proxy(self))

    def _check(self, use_tqdm: bool) -> None:
        self.check_open()
        check_bool("use_tqdm", use_tqdm)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _params_list(params: Any, num_prompts: int) -> list[Any]:
    """One SamplingParams for each prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise TypeError(
            f"sampling_params must be a SamplingParams or a list of them, got {shorten(params)}"
        )
    if len(params) != num_prompts:
        raise ValueError(
            f"sampling_params must be one or as many as prompts ({num_prompts}), got {len(params)}"
        )
    return list(params)
