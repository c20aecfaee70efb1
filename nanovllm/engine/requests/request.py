"""Request: the sequences of one prompt's samples, from which the output is made."""

from dataclasses import dataclass, field
from typing import Any

from nanovllm.engine.requests.measures import RequestMeter, RequestTimes
from nanovllm.engine.requests.output_text import text_of
from nanovllm.engine.schedule.sequence import Sequence, SequenceStatus
from nanovllm.outputs import CompletionOutput, FinishReason, RequestOutput


@dataclass(slots=True)
class Request:
    """The samples of one prompt, in order. The first sample's number is the request's id."""

    seqs: list[Sequence]
    prompt: str | None = None  # the prompt's text, for the output
    times: RequestTimes = field(default_factory=RequestTimes)

    @property
    def request_id(self) -> int:
        """The request's number, which its sequences also have."""
        return self.seqs[0].request_id

    @property
    def unfinished(self) -> list[Sequence]:
        """The sequences that have not ended."""
        return [seq for seq in self.seqs if seq.status is not SequenceStatus.FINISHED]

    @property
    def is_aborted(self) -> bool:
        """Whether it was aborted; an interrupt may have left some of its sequences unfinished."""
        return any(seq.finish_reason == "abort" for seq in self.seqs)

    @property
    def nums_generated(self) -> list[int]:
        """How many known tokens each sample has."""
        return [seq.num_known_tokens - seq.num_prompt_tokens for seq in self.seqs]

    def end(self, now: float) -> None:
        """Record the end, and what is known then."""
        self.times.ended = now
        self.times.num_preemptions = sum(seq.num_preemptions for seq in self.seqs)

    def measure(self, meter: RequestMeter) -> None:
        """Count this request, which has ended, in `meter`."""
        nums = self.nums_generated
        samples = zip(nums, (seq.finish_reason or "abort" for seq in self.seqs), strict=True)
        meter.add(self.times.metrics(max(nums)), self.seqs[0].num_prompt_tokens, samples)

    def output(self, tokenizer: Any, made: list[CompletionOutput] | None = None) -> RequestOutput:
        """Make the output; without a tokenizer, or with `detokenize=False`, its texts are empty."""
        first = self.seqs[0]
        tokenizer = tokenizer if first.params.detokenize else None
        outputs = made or [completion(seq, tokenizer) for seq in self.seqs]
        prompt_logprobs = None
        if first.params.prompt_logprobs is not None:
            prompt_logprobs = first.parts.logprobs.of_prompt(tokenizer)
        output = RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.token_ids[: first.num_prompt_tokens],
            text=outputs[0].text,
            token_ids=outputs[0].token_ids,
            finish_reason=outputs[0].finish_reason,
            stop_reason=outputs[0].stop_reason,
            logprobs=outputs[0]["logprobs"],
            cumulative_logprob=outputs[0].cumulative_logprob,
            outputs=outputs,
            num_prompt_tokens=first.num_prompt_tokens,
            num_cached_tokens=first.num_hit_tokens or 0,
            prompt_logprobs=prompt_logprobs,
            metrics=self.times.metrics(max(len(output.token_ids) for output in outputs)),
        )
        if first.parts.keeper is not None and first.generates:
            output["prompt_hidden_states"] = first.parts.keeper.prompt
            output["hidden_states"] = outputs[0].hidden_states
        return output


def check_no_error(seq: Sequence) -> None:
    """Raise if a sequence has ended with an error."""
    if seq.finish_reason == "error":
        raise ValueError(seq.stop_reason)


def completion(seq: Sequence, tokenizer: Any) -> CompletionOutput:
    """The output of a finished sequence."""
    text, reason, stop = ending(seq, tokenizer)
    likely = None
    if seq.params.logprobs is not None:
        likely = seq.parts.logprobs.since(seq, seq.num_prompt_tokens, tokenizer)
    output = CompletionOutput(
        index=seq.index,
        text=text,
        token_ids=seq.output_token_ids,
        finish_reason=reason,
        stop_reason=stop,
        logprobs=likely,
        cumulative_logprob=None if likely is None else seq.parts.logprobs.total(seq),
    )
    if seq.parts.keeper is not None and seq.generates:
        output["hidden_states"] = seq.parts.keeper.generated(seq)
    return output


def ending(seq: Sequence, tokenizer: Any) -> tuple[str, FinishReason, int | str | None]:
    """The text of a finished sequence, its `finish_reason` and its `stop_reason`."""
    assert seq.finish_reason is not None
    text, reason, stop = "", seq.finish_reason, seq.stop_reason
    if (followed := seq.parts.text) is not None:
        text = followed.finish(seq)
        if followed.stop is not None and stop is None and reason != "abort":  # held back
            reason, stop = "stop", followed.stop
    elif tokenizer is not None:
        text = text_of(seq, tokenizer)
    return text, reason, stop
