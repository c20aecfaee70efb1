"""LLM: the facade. Prompts in, texts out, in the order of the prompts."""

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.requests.generation import Params, accept_prompts, check_call, complete, stream
from nanovllm.features import AllFeatures
from nanovllm.outputs import RequestOutput, StreamEvent
from nanovllm.prompts import Prompt
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from nanovllm.beam_search_params import BeamSearchParams
    from nanovllm.beams.outputs import BeamSearchOutput
    from nanovllm.chat.chat_format import Turn
    from nanovllm.llm_parts import LLMParts
    from nanovllm.lora_request import LoRARequest, LoRARequests
    from nanovllm.pooling_params import PoolingParams
    from nanovllm.vectors.outputs import (
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from nanovllm.vectors.pooling import Pooling
    from nanovllm.vectors.preparer import Prompts
    from nanovllm.weights.weights import NamedTensors, Running


class LLM(LLMEngine):
    """A model, ready to generate: `LLM(model, **options)`; `Config` has the options.

    `model` is a local directory or a hub id. Use it in a `with` block, or `close()` it, to free the
    device's memory at once.
    """

    features = AllFeatures()

    @functools.cached_property
    def parts(self) -> "LLMParts":
        """The parts that only some calls need."""
        from nanovllm.llm_parts import LLMParts

        return LLMParts(self)

    def generate(
        self, prompts: Prompt | Iterable[Prompt] | None = None, sampling_params: Params = None,
        use_tqdm: bool = True, lora_request: "LoRARequests" = None, **others: Any,
    ) -> list[RequestOutput]:  # fmt: skip
        """Complete every prompt; return the outputs in the order of the prompts.

        A prompt is a str, a list of token ids, or a dict with `prompt` or `prompt_token_ids`.
        `sampling_params` and `lora_request`, an adapter, are None, one for all prompts, or a list
        with one for each. All prompts are checked before any is queued: an error names the prompt's
        index, and changes nothing. If the call is interrupted, its requests are aborted. Others are
        vLLM's `priority`, a list, and `prompt_token_ids`, instead of prompts.
        """
        check_call(self, use_tqdm)
        if others or prompts is None:
            from nanovllm.from_vllm.calls import generate_inputs

            prompts, sampling_params = generate_inputs(prompts, sampling_params, others)
        accepted = accept_prompts(self, prompts, sampling_params, lora_request)
        return complete(self, accepted, use_tqdm)

    def stream(
        self, prompts: Prompt | Iterable[Prompt], sampling_params: Params = None,
        lora_request: "LoRARequests" = None,
    ) -> Iterator[StreamEvent]:  # fmt: skip
        """Complete every prompt, and yield new text and tokens as they come.

        Arguments are those of `generate`, and are checked at the call; requests are queued when the
        first event is asked for. Closing the iterator, or dropping it, aborts unfinished requests.
        """
        self.check_open()
        return stream(self, accept_prompts(self, prompts, sampling_params, lora_request))

    def chat(
        self, messages: Iterable[Any], sampling_params: Params = None,
        use_tqdm: bool = True, lora_request: "LoRARequests" = None, *,
        tools: list[Any] | None = None, tool_choice: Any = None,
        parallel_tool_calls: bool | None = None, add_generation_prompt: bool = True,
        **chat_template_kwargs: Any,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answer conversations, which the tokenizer's chat template turns into prompts.

        `messages` is one conversation or a list of them; a conversation is a list of messages,
        `{"role": ..., "content": ...}`. Other keywords go to the template (Qwen3's takes
        `enable_thinking=False`), as does a dict `chat_template_kwargs`; `chat_template=` replaces
        the tokenizer's. Otherwise as `generate`. Each output and sample has a `message`, the answer
        as OpenAI's API writes it, with `reasoning_content` and `tool_calls`: see docs/tools.md.
        """
        check_call(self, use_tqdm)
        turns = self.chat_turns(
            messages, sampling_params, tools=tools, tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls, add_generation_prompt=add_generation_prompt,
            **chat_template_kwargs,
        )  # fmt: skip
        return self.parts.chats.answer(turns, lora_request, use_tqdm)

    def stream_chat(
        self, messages: Iterable[Any], sampling_params: Params = None, *,
        lora_request: "LoRARequests" = None, **options: Any,
    ) -> Iterator[StreamEvent]:  # fmt: skip
        """Answer conversations, and yield new text and tokens as they come, as `stream`.

        Options are the keywords of `chat`. Each event has a `delta`, the new part in the form of
        OpenAI's API: `reasoning_content`, `content`, and `tool_calls` with pieces of arguments.
        """
        self.check_open()
        turns = self.chat_turns(messages, sampling_params, **options)
        accepted = self.intake.accept_all([turn.asked for turn in turns], lora_request)
        return self.parts.chats.format.with_deltas(turns, stream(self, accepted))

    def chat_turns(
        self, messages: Iterable[Any], sampling_params: Params = None, **options: Any
    ) -> "list[Turn]":
        """The prompts and parameters of `chat`; `turn.answer.message(text)` reads an answer."""
        return self.parts.chats.turns(messages, sampling_params, **options)

    def chat_prompts(self, messages: Iterable[Any], **options: Any) -> list[list[int]]:
        """The token ids of the prompts that `chat` makes."""
        return [[*turn.prompt["prompt_token_ids"]] for turn in self.chat_turns(messages, **options)]

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a chat template for `chat`."""
        return self.parts.chats.format.has_template

    def get_tokenizer(self) -> Any:
        """The tokenizer, one of transformers; a ValueError if the model has none."""
        if self.tokenizer is None:
            raise ValueError("the model directory has no tokenizer")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of `generation_config.json`; they apply only where they are passed."""
        from nanovllm.models.generation_config import recommended_params

        return recommended_params(self.model_path)

    def embed(
        self, prompts: "Prompts", *, use_tqdm: bool = True, dimensions: int | None = None,
        normalize: bool | None = None, pooling: "Pooling | None" = None,
        prompt_name: str | None = None, instruction: str | None = None,
        truncate_prompt_tokens: int | None = None, pooling_params: "PoolingParams | None" = None,
        lora_request: "LoRARequests" = None, **others: Any,
    ) -> "list[EmbeddingRequestOutput]":  # fmt: skip
        """The vector of every prompt, in the order of the prompts.

        `pooling` and `normalize` are by default what sentence-transformers' files in the model's
        directory say, or else the last token's normalized state. Texts begin with the model's
        prompt `prompt_name`, or with an `instruction` for queries. `pooling_params` has options in
        vLLM's form. docs/embeddings.md has a table of all options.
        """
        return self.parts.vectors.embed(
            prompts, use_tqdm, lora_request, dimensions=dimensions, normalize=normalize,
            pooling=pooling, prompt_name=prompt_name, instruction=instruction,
            truncate_prompt_tokens=truncate_prompt_tokens, pooling_params=pooling_params, **others,
        )  # fmt: skip

    def encode(
        self, prompts: "Prompts", pooling: "Pooling | PoolingParams | None" = None, *,
        use_tqdm: bool = True, truncate_prompt_tokens: int | None = None,
        pooling_params: "PoolingParams | None" = None, lora_request: "LoRARequests" = None,
        **others: Any,
    ) -> "list[PoolingRequestOutput]":  # fmt: skip
        """The hidden states of every prompt after the final norm, in float32, not normalized.

        `pooling` is "last", "cls" (the first token), "mean" or "all"; by default the model's.
        vLLM's order, with a PoolingParams in its place, works too.
        """
        return self.parts.vectors.encode(
            prompts, pooling, use_tqdm, lora_request, pooling_params=pooling_params,
            truncate_prompt_tokens=truncate_prompt_tokens, **others,
        )  # fmt: skip

    def score(
        self, queries: "Prompts", documents: "Prompts", *, instruction: str | None = None,
        method: str | None = None, use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None, pooling_params: "PoolingParams | None" = None,
        lora_request: "LoRARequest | None" = None, **others: Any,
    ) -> "list[ScoringRequestOutput]":  # fmt: skip
        """How well documents fit queries, in the order of the documents.

        There is one query for all documents, or one for each; `instruction` says what queries ask.
        With `method` "yes_no", Qwen3-Reranker's, a score is the probability of "yes" against "no";
        with "cosine" it is the cosine of two embeddings. Rerankers use "yes_no" by default.
        """
        return self.parts.vectors.score(
            queries, documents, use_tqdm, lora_request, instruction=instruction, method=method,
            truncate_prompt_tokens=truncate_prompt_tokens, pooling_params=pooling_params, **others,
        )  # fmt: skip

    def beam_search(
        self, prompts: Prompt | Iterable[Prompt], params: "BeamSearchParams",
        lora_request: "LoRARequests" = None, use_tqdm: bool = False, *,
        concurrency_limit: int | None = None,
    ) -> "list[BeamSearchOutput]":  # fmt: skip
        """The `beam_width` most likely outputs of every prompt, in the order of the prompts.

        They equal those of transformers' `generate` with `num_beams` and without sampling. At most
        `concurrency_limit` prompts are searched at once, by default all. See docs/beam_search.md.
        """
        return self.parts.beams.search(prompts, params, lora_request, use_tqdm, concurrency_limit)

    def check_adapter(self, lora_request: "LoRARequest") -> None:
        """Read an adapter for later requests; raises if it does not fit the model."""
        self.adapters.read(lora_request)

    def update_weights(self, weights: "NamedTensors", *, running: "Running" = "refuse") -> None:
        """Replace weights by the tensors of an iterable of (name, tensor), or of a dict.

        Names and shapes are those of the checkpoint. A list or a dict is checked before anything
        changes; another iterable is loaded as it comes, and if it fails in the middle, requests are
        refused until all weights are updated. Waiting requests go on with the new weights. If some
        have begun, `running="refuse"` raises, and "abort" ends them. More is in docs/training.md.
        """
        self.parts.weights.update_weights(weights, running=running)

    def begin_update(self, running: "Running" = "refuse") -> None:
        """Begin an update in parts: `load_weights` for each, then `end_update`."""
        self.parts.weights.begin_update(running)

    def load_weights(self, weights: list[tuple[str, Any]]) -> None:
        """Load a part of an update. If it raises, the update is given up, as by `cancel_update`."""
        self.parts.weights.load_weights(weights)

    def end_update(self) -> None:
        """End an update: requests run with the new weights."""
        self.parts.weights.end_update()

    def cancel_update(self) -> None:
        """End an update that cannot be completed, if it has not ended."""
        self.parts.weights.cancel_update()

    def reload_weights(self, *, running: "Running" = "refuse") -> None:
        """Load all weights of the checkpoint again."""
        self.parts.weights.reload_weights(running=running)

    def get_weights(self, names: str | Iterable[str] | None = None) -> "dict[str, torch.Tensor]":
        """Copies of weights that are not quantized, by the checkpoint's names; default: all."""
        return self.parts.weights.get_weights(names)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of all tensors that an update may have, with nothing fused."""
        return self.parts.weights.weight_shapes()

    def apply_model(self, function: "Callable[[torch.nn.Module], Any]") -> list[Any]:
        """Call a function with every rank's model, a `torch.nn.Module`; rank 0's result is first.

        docs/training.md says how its layers are fused, and how functions reach other ranks. After
        a function that changes weights, call `reset_prefix_cache`.
        """
        return self.parts.weights.apply_model(function)

    def sleep(self, level: int = 1, *, running: "Running" = "refuse") -> None:
        """Free the device's memory until `wake_up`; it needs `enable_sleep_mode=True`.

        Level 1 moves the weights to the host and frees the KV pool; level 2 drops the weights, too.
        Until then requests are refused. If the host has no memory for the weights, this raises.
        """
        self.parts.sleep_mode.sleep(level, running=running)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Get the memory back that `sleep` freed: "weights" or "kv_cache", or all by default.

        Weights that level 2 dropped are loaded from the checkpoint, but not if `tags` are given.
        """
        self.parts.sleep_mode.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine sleeps: memory is freed until `wake_up`."""
        return self.parts.sleep_mode.is_sleeping

    def start_profile(self) -> None:
        """Begin to record what all ranks do, on host and device. It makes steps slower."""
        self.parts.profiles.start()

    def stop_profile(self) -> list[Path]:
        """End the recording; returns the trace of each rank, for Perfetto or chrome://tracing."""
        return self.parts.profiles.stop()

    if not TYPE_CHECKING:  # type checkers would accept any name

        def __getattr__(self, name):
            from nanovllm.from_vllm.attributes import attribute_of

            return attribute_of(self, name)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
