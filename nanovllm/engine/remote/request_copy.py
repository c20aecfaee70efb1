"""RequestCopy: the caller's copy of a request in another process, with the text of its samples."""

from collections.abc import Iterator
from typing import Any

from nanovllm.engine.remote.messages import PromptProgress, RequestEnd, SampleProgress
from nanovllm.engine.requests.request import Request, completion
from nanovllm.engine.requests.stream import Stream
from nanovllm.engine.schedule.parts import End
from nanovllm.engine.schedule.sequence import Sequence, SequenceStatus
from nanovllm.outputs import RequestOutput, StreamEvent
from nanovllm.utils.slices import SLICE, Steps

TOKENS_DECODED = 4  # in the time of one unit of work


class RequestCopy:
    """A copy of a request that another process computes.

    Stop strings are found here: `apply` says which samples they end.
    """

    def __init__(self, request: Request, tokenizer: Any) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._stream = Stream([0], [len(request.seqs)], tokenizer)
        request.seqs[0].siblings = []

    @property
    def has_ended(self) -> bool:
        """Whether all samples have ended."""
        return not self.request.unfinished

    def add(self, sample: int, token_id: int) -> bool:
        """Add a token. True if a stop has ended the sample here, and not yet in the engine."""
        seq = self.request.seqs[sample]
        if seq.status is SequenceStatus.FINISHED:
            return False
        seq.token_ids.append(token_id)
        if not seq.params.stop or (end := _stop(seq)) is None:
            return False
        seq.finish(*end)
        return True

    def apply(self, progress: SampleProgress) -> bool:
        """Add new tokens. True if a stop has ended the sample here, and not yet in the engine."""
        seq = self.request.seqs[progress.sample]
        if seq.status is SequenceStatus.FINISHED:
            return False
        for place, token_id in enumerate(progress.token_ids):
            if progress.logprobs is not None:
                seq.parts.logprobs.add(seq, len(seq.token_ids), progress.logprobs[place])
            seq.token_ids.append(token_id)
            is_last = place == len(progress.token_ids) - 1
            ends_there = is_last and progress.reason not in (None, "length")
            if seq.params.stop and not ends_there and (end := _stop(seq)) is not None:
                seq.finish(*end)
                return not (is_last and progress.reason)
        if progress.reason is not None:
            seq.finish(progress.reason, progress.stop_reason)
        return False

    def add_prompt(self, part: PromptProgress) -> None:
        """Add log-probabilities of the prompt."""
        self.request.seqs[0].parts.logprobs.prompt += part.logprobs

    def end(self, ended: RequestEnd) -> None:
        """Add the results that are known at the end."""
        first = self.request.seqs[0]
        self.request.times, first.num_hit_tokens = ended.times, ended.num_hit_tokens
        for seq, keeper in zip(self.request.seqs, ended.keepers or (), strict=False):
            seq.parts.keeper = keeper

    def events(self) -> Iterator[StreamEvent]:
        """The new parts of all samples since the last call, made one by one.

        An event has at most about SLICE log-probabilities, however many have come since the last.
        """
        for seq in self.request.seqs:
            yield from self._parts(seq)
            event = self._stream.event(0, seq)
            if event is not None:
                yield event

    def output(self, is_lazy: bool) -> Steps[RequestOutput]:
        """Make the whole output; all samples have ended.

        If it `is_lazy`, its log-probabilities are made while the caller iterates over them.
        """
        outputs = []
        for seq in self.request.seqs:
            tokenizer = self._tokenizer if seq.params.detokenize else None
            if seq.parts.logprobs is not None:
                seq.parts.logprobs.is_lazy = is_lazy
            if seq.parts.logprobs is not None and not is_lazy:
                yield from seq.parts.logprobs.prepare(seq, tokenizer)
            outputs.append(completion(seq, tokenizer))
            yield len(seq.output_token_ids) // TOKENS_DECODED
        return self.request.output(self._tokenizer, outputs)

    def _parts(self, seq: Sequence) -> Iterator[StreamEvent]:
        """Events of a sample with tokens and no text, until those that are left fit in one."""
        reported = self._stream.reported[0]
        if (num := seq.params.logprobs) is None:
            return
        most = max(1, SLICE // (num + 1))
        while (place := reported[seq.index]) is not None:
            num_chars, num_tokens = place
            start = seq.num_prompt_tokens + num_tokens
            if seq.num_known_tokens <= start + most:
                return
            reported[seq.index] = num_chars, num_tokens + most
            yield StreamEvent(
                index=0, sample=seq.index, request_id=seq.request_id, text="",
                token_ids=seq.token_ids[start : start + most], finish_reason=None,
                stop_reason=None,
                logprobs=seq.parts.logprobs.since(seq, start, self._tokenizer, start + most),
            )  # fmt: skip


def _stop(seq: Sequence) -> End | None:
    end: End | None = seq.parts.text.update(seq)
    return end
