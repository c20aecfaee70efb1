"""Progress: a request's outputs in vLLM's form, made of the events of its stream.

And what engines say of their model in this form.
"""

from types import SimpleNamespace
from typing import Any

from nanovllm.engine.requests.request import Request
from nanovllm.output_kind import RequestOutputKind
from nanovllm.outputs import CompletionOutput, RequestOutput, StreamEvent
from nanovllm.sampling_params import SamplingParams


class PartialOutput(RequestOutput):
    """An output of a request that has not ended."""

    @property
    def finished(self) -> bool:
        """False: more outputs will come."""
        return False


class Progress:
    """What a request has generated so far, and the outputs that its caller gets of it.

    Outputs have the caller's name of the request as `request_id`.
    """

    def __init__(self, name: str, params: SamplingParams) -> None:
        self.name = name
        self.kind = params.output_kind or RequestOutputKind.CUMULATIVE
        self._asks = params.logprobs is not None
        self._samples = [self._sample(index) for index in range(params.n)]
        self._new: dict[int, CompletionOutput] = {}  # what the next output adds, by sample

    def add(self, event: StreamEvent) -> None:
        """Add the new part of a sample."""
        sample = self._samples[event.sample]
        _add(sample, event)
        new = self._new.setdefault(event.sample, self._sample(event.sample))
        _add(new, event)
        new["cumulative_logprob"] = sample.cumulative_logprob

    @property
    def has_ended(self) -> bool:
        """Whether all samples have ended."""
        return all(sample["finish_reason"] is not None for sample in self._samples)

    def output(self, request: Request, tokenizer: Any) -> RequestOutput | None:
        """The next output of this kind; None if nothing is new or only the last one counts."""
        has_ended = self.has_ended
        if not self._new or (self.kind is RequestOutputKind.FINAL_ONLY and not has_ended):
            return None
        if self.kind is RequestOutputKind.DELTA:
            samples = [self._new[index] for index in sorted(self._new)]
        else:
            samples = [_copy(sample) for sample in self._samples]
        self._new = {}
        output = request.output(tokenizer, samples)
        output["request_id"] = self.name
        return output if has_ended else PartialOutput(**output)

    def _sample(self, index: int) -> CompletionOutput:
        """A sample without tokens."""
        empty: Any = dict(finish_reason=None, cumulative_logprob=0.0 if self._asks else None)
        likely: Any = [] if self._asks else None
        return CompletionOutput(
            index=index, text="", token_ids=[], stop_reason=None, logprobs=likely, **empty
        )


def _add(sample: CompletionOutput, event: StreamEvent) -> None:
    """Add the new part of a sample to what is known of it."""
    sample["text"] += event.text
    sample["token_ids"] += event.token_ids
    sample["finish_reason"], sample["stop_reason"] = event.finish_reason, event.stop_reason
    if event.logprobs is not None:
        sample["logprobs"] += event.logprobs
        sample["cumulative_logprob"] += sum(entry[0].logprob for entry in event.logprobs)


def _copy(sample: CompletionOutput) -> CompletionOutput:
    """A copy that later events do not change."""
    copy = CompletionOutput(**sample)
    copy["token_ids"] = [*sample.token_ids]
    copy["logprobs"] = sample["logprobs"] and [*sample["logprobs"]]
    return copy


def model_config_of(llm: Any) -> SimpleNamespace:
    """What scripts read most of the config of vLLM's engines: names, lengths and sizes."""
    asked, vocab_size = llm.asked, llm.model_config.vocab_size
    return SimpleNamespace(
        model=asked.model, tokenizer=asked.tokenizer or asked.model, dtype=asked.dtype,
        max_model_len=llm.config.max_model_len, seed=asked.seed,
        get_vocab_size=lambda: vocab_size,
    )  # fmt: skip
