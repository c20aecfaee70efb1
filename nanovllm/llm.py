"""LLM: the facade. Prompts in, texts out, in the order in which the prompts came."""

import dataclasses
import numbers
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm

from nanovllm.engine.llm_engine import LLMEngine, StepCounter, exclusive
from nanovllm.engine.requests.intake import Prompt
from nanovllm.engine.requests.request import ending, logprobs
from nanovllm.engine.sequence import SequenceStatus
from nanovllm.outputs import RequestOutput, StreamEvent
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import as_list, check_text, shorten

WINDOW = 200  # steps that the progress bar's rates are taken over


@dataclass(slots=True)
class Told:
    """What a stream has told of a prompt: characters and tokens of each sample, None for all."""

    index: int
    places: list[tuple[int, int] | None]


class LLM(LLMEngine):
    """A model, ready to generate: `LLM(model, **config)`, see `Config` for the options.

    `model` is a local directory or a hub id. Use it in a `with` block, or `close()` it, to give
    the device's memory back at once.
    """

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; return the outputs in the order of the prompts.

        A prompt is a str or a list of token ids; one alone, or a list of them. Parameters: None,
        one for all, or one for each. Everything is checked before anything is queued: a bad
        prompt or parameter raises, naming its index, and leaves the engine as it was. When the
        call is interrupted, its requests are aborted and the engine can be used again.
        """
        self._check_open()
        return self._generate(*self._encode_all(prompts, sampling_params), use_tqdm)

    def chat(
        self,
        messages: Iterable[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = True,
        **chat_template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, which the tokenizer's chat template turns into prompts.

        A conversation is a list of messages, `{"role": ..., "content": ...}`; one alone, or a list
        of them. What further keywords mean is the template's business (Qwen3's knows
        `enable_thinking=False`); they may also come as one dict, `chat_template_kwargs`, as in
        vLLM. Otherwise as `generate`.
        """
        self._check_open()
        prompts = self.chat_prompts(messages, tools, add_generation_prompt, **chat_template_kwargs)
        return self.generate(prompts, sampling_params, use_tqdm)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be made into prompts."""
        return getattr(self.tokenizer, "chat_template", None) is not None

    def chat_prompts(
        self,
        messages: Iterable[Any],
        tools: list[Any] | None = None,
        add_generation_prompt: bool = True,
        **chat_template_kwargs: Any,
    ) -> list[list[int]]:
        """The prompts that `chat` makes of conversations: for `stream` and `add_request`."""
        more = chat_template_kwargs.pop("chat_template_kwargs", None) or {}
        if not isinstance(more, Mapping):
            raise TypeError(f"chat_template_kwargs must be a dict, got {shorten(more)}")
        options = dict(tools=tools, add_generation_prompt=add_generation_prompt)
        options |= {**more, **chat_template_kwargs}
        return [
            self._apply_template(index, conversation, options)
            for index, conversation in enumerate(_conversations(messages))
        ]

    def _apply_template(self, index: int, conversation: Any, options: dict[str, Any]) -> list[int]:
        """Token ids of conversation `index`. The template writes the special tokens itself."""
        if not self.has_chat_template:
            owner = (
                "the model directory has no tokenizer"
                if self.tokenizer is None
                else "the tokenizer has no chat template"
            )
            raise ValueError(f"{owner}; make prompts yourself, and pass them to generate()")
        try:
            text = self.tokenizer.apply_chat_template(conversation, tokenize=False, **options)
        except Exception as error:  # a template is a program, and raises what it likes
            raise ValueError(f"conversations[{index}]: the chat template fails: {error}") from error
        check_text(f"conversations[{index}]", text)
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamEvent]:
        """Complete every prompt, and tell of new text and tokens as they come.

        Prompts, parameters and their checks are those of `generate`, at the call; requests are
        queued at the first event that is asked for. Closing the iterator, or dropping it, aborts
        what is unfinished.
        """
        self._check_open()
        return self._stream(*self._encode_all(prompts, sampling_params))

    def _stream(
        self, prompts: list[list[int]], params: list[SamplingParams]
    ) -> Iterator[StreamEvent]:
        self._check_open()
        ids = self._enqueue_all(prompts, params)
        try:
            samples = enumerate(one.n for one in params)
            tellings = [Told(index, [(0, 0)] * n) for index, n in samples]
            told = dict(zip(ids, tellings, strict=True))
            while told:
                self._check_open()
                yield from self._stream_step(told)
        finally:
            self._abandon(ids)

    @exclusive
    def _enqueue_all(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[int]:
        return [self._enqueue(*pair, True) for pair in zip(prompts, params, strict=True)]

    @exclusive
    def _stream_step(self, told: dict[int, Told]) -> list[StreamEvent]:
        """Run a step, unless some request has finished already in one of another call."""
        if told.keys() <= self._requests.keys():
            self._step()
        events: list[StreamEvent] = []
        for request_id, telling in list(told.items()):
            request = self._requests.get(request_id) or self._finished.get(request_id)
            if request is None:  # aborted by another call, which has its output
                events += (
                    StreamEvent(
                        index=telling.index, sample=sample, request_id=request_id, text="",
                        token_ids=[], finish_reason="abort", stop_reason=None, logprobs=None,
                    )
                    for sample, place in enumerate(telling.places) if place is not None
                )  # fmt: skip
            else:
                news = (self._event(telling, seq) for seq in request.seqs)
                events += (event for event in news if event is not None)
            if request_id not in self._requests:
                del told[request_id]
                self._forget(request_id)
        return events

    def _event(self, telling: Told, seq: Any) -> StreamEvent | None:
        """What is new of a sample, if anything; `telling` is brought up to date."""
        place = telling.places[seq.index]
        if place is None:
            return None
        num_chars, num_tokens = place
        start, end = seq.num_prompt_tokens + num_tokens, seq.num_known_tokens
        reason = stop = None
        if seq.status is SequenceStatus.FINISHED:
            telling.places[seq.index] = None
            text, reason, stop = ending(seq, self.tokenizer)
            text = text[num_chars:]
        elif start < end:
            seq.text.update(seq)
            telling.places[seq.index] = seq.text.num_certain, end - seq.num_prompt_tokens
            text = seq.text.text[num_chars : seq.text.num_certain]
        else:
            return None
        return StreamEvent(
            index=telling.index,
            sample=seq.index,
            request_id=seq.request_id,
            text=text,
            token_ids=seq.token_ids[start:end],
            finish_reason=reason,
            stop_reason=stop,
            logprobs=logprobs(seq, start, self.tokenizer),
        )

    @exclusive
    def _generate(
        self, prompts: list[list[int]], params: list[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        ids = [self._enqueue(*pair) for pair in zip(prompts, params, strict=True)]
        self._run_until_done(ids, use_tqdm)
        return self._claim(ids)

    def _encode_all(
        self, prompts: Any, sampling_params: Any
    ) -> tuple[list[list[int]], list[SamplingParams]]:
        """Check everything that a call asks for, before anything is queued."""
        prompt_list = _prompt_list(prompts)
        params_list = _params_list(sampling_params, len(prompt_list))
        encoded = [
            self._encode_at(index, prompt, params)
            for index, (prompt, params) in enumerate(zip(prompt_list, params_list, strict=True))
        ]
        return encoded, params_list

    def _encode_at(self, index: int, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Check and encode prompt `index`; an error says which one it was."""
        try:
            return self._intake.encode(prompt, params)
        except (TypeError, ValueError) as error:
            raise type(error)(f"prompts[{index}]: {error}") from None

    def _run_until_done(self, ids: list[int], use_tqdm: bool) -> None:
        """Step until all of `ids` are finished; outputs of other requests wait for `step()`."""
        pending = set(ids)
        window = deque([dataclasses.replace(self.counter)], maxlen=WINDOW)
        # Not a silent bar: what Ctrl-C raises while one is collected is lost.
        made = tqdm(total=len(ids), desc="Generating", unit="req") if use_tqdm else nullcontext()
        with made as bar:
            while pending:
                self._step()
                done = pending & self._finished.keys()
                pending -= done
                if bar is not None:
                    window.append(dataclasses.replace(self.counter))
                    bar.set_postfix_str(self._progress(window[0]), refresh=False)
                    bar.update(len(done))

    def _progress(self, before: StepCounter) -> str:
        """The rates since `before`, those running and waiting, and how full the pool is."""
        now, stats = self.counter, self.stats()
        prefill, decode = (
            (getattr(now, f"{kind}_tokens") - getattr(before, f"{kind}_tokens"))
            / max(getattr(now, f"{kind}_seconds") - getattr(before, f"{kind}_seconds"), 1e-9)
            for kind in ("prefill", "decode")
        )
        return (
            f"prefill {tqdm.format_sizeof(prefill)}, decode {tqdm.format_sizeof(decode)} tok/s,"
            f" {stats['num_running']}+{stats['num_waiting']} seqs,"
            f" KV {stats['blocks_used'] / stats['num_blocks']:.0%}"
        )

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _prompt_list(prompts: Any) -> list[Any]:
    """A list of prompts from one or several."""
    if isinstance(prompts, str):
        return [prompts]
    items = as_list("prompts", prompts)
    is_one_prompt = bool(items) and isinstance(items[0], numbers.Number)
    return [items] if is_one_prompt else items


def _conversations(messages: Any) -> list[list[Any]]:
    """A list of conversations from one or several."""
    items = as_list("messages", messages, "a list of messages, or of such lists")
    conversations = [items] if items and isinstance(items[0], Mapping) else items
    for index, conversation in enumerate(conversations):
        if not isinstance(conversation, Sequence) or isinstance(conversation, str):
            raise TypeError(
                f"conversations[{index}] must be a list of messages, got {shorten(conversation)}"
            )
        for message in conversation:
            if not isinstance(message, Mapping) or "role" not in message:
                raise ValueError(
                    f'conversations[{index}]: a message must be a dict with a "role", got'
                    f" {shorten(message)}"
                )
        if not conversation:
            raise ValueError(f"conversations[{index}] must have a message or more, got none")
    return conversations


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
