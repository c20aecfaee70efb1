"""LLM: the facade. Prompts in, texts out, in the order of the prompts."""

import functools
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any

from nanovllm.beams.calls import BeamCalls
from nanovllm.chat.answers import AnswerReader
from nanovllm.chat.chat_format import ChatFormat, Turn
from nanovllm.chat.conversation import has_chat_template
from nanovllm.engine.llm_engine import exclusive
from nanovllm.engine.profile import ProfileCalls
from nanovllm.engine.progress import run_until_done
from nanovllm.engine.requests.intake import Accepted, check_whole
from nanovllm.engine.requests.stream import Stream
from nanovllm.engine.weights.sleep_calls import SleepCalls
from nanovllm.lora_request import LoRARequests
from nanovllm.models.generation_config import recommended_params
from nanovllm.outputs import RequestOutput, StreamEvent
from nanovllm.prompts import Prompt, prompt_list
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_bool, shorten
from nanovllm.vectors.calls import VectorCalls


class LLM(VectorCalls, BeamCalls, SleepCalls, ProfileCalls):
    """A model, ready to generate: `LLM(model, **options)`; `Config` has the options.

    `model` is a local directory or a hub id. Use it in a `with` block, or `close()` it, to free the
    device's memory at once.
    """

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
        self.check_open()
        check_bool("use_tqdm", use_tqdm)
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
        self.check_open()
        check_bool("use_tqdm", use_tqdm)
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
        self, turns: list[Turn], source: Generator[StreamEvent, None, None]
    ) -> Generator[StreamEvent, None, None]:
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
    ) -> list[Turn]:
        """The prompts of `chat`, the parameters of their requests, and how answers are read.

        For `add_request` and `stream`: `turn.answer.message(text)` is the message of an answer.
        """
        params_list = functools.partial(_params_list, sampling_params)
        return self._chat_format.turns(messages, params_list, **options)

    @property
    def _chat_format(self) -> ChatFormat:
        return ChatFormat(self.tokenizer, self._asked.tool_parser, self._asked.reasoning_parser)

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a chat template for `chat`."""
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

    def _accept_turns(self, turns: list[Turn], lora_request: Any) -> list[Accepted]:
        return self.accept_all([(turn.prompt, turn.params) for turn in turns], lora_request)

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
