"""Stream: makes the events of one call, and records how much they have reported."""

from typing import Any

from nanovllm.engine.requests.request import Request, ending
from nanovllm.engine.schedule.sequence import Sequence, SequenceStatus
from nanovllm.outputs import StreamEvent


class Stream:
    """The prompts of a call with the requests `request_ids`, each with `num_samples` samples.

    `open` holds the requests that have events to come, with their prompts' indices.
    """

    def __init__(self, request_ids: list[int], num_samples: list[int], tokenizer: Any) -> None:
        self.open = {request_id: index for index, request_id in enumerate(request_ids)}
        self._tokenizer = tokenizer
        # How many characters and tokens of each sample events have reported; None if it has ended.
        self.reported: dict[int, list[tuple[int, int] | None]]
        self.reported = {index: [(0, 0)] * n for index, n in enumerate(num_samples)}

    def events(self, request_id: int, request: Request | None) -> list[StreamEvent]:
        """The new events of an open request. A request that another call has aborted is None."""
        index = self.open[request_id]
        if request is None:
            from nanovllm.engine.requests.aborted import last_events

            return last_events(index, self.reported[index], request_id)
        return [e for seq in request.seqs if (e := self.event(index, seq)) is not None]

    def event(self, index: int, seq: Sequence) -> StreamEvent | None:
        """An event with the new part of a sample, if there is one; counts it as reported."""
        reported = self.reported[index]
        place = reported[seq.index]
        if place is None:
            return None
        num_chars, num_tokens = place
        start, end = seq.num_prompt_tokens + num_tokens, seq.num_known_tokens
        reason = stop = None
        if seq.status is SequenceStatus.FINISHED:
            reported[seq.index] = None
            text, reason, stop = ending(seq, self._tokenizer)
            text = text[num_chars:]
        elif start < end:
            seq.parts.text.update(seq)
            num_certain = seq.parts.text.num_certain
            reported[seq.index] = num_certain, end - seq.num_prompt_tokens
            text = seq.parts.text.part(num_chars, num_certain)
        else:
            return None
        likely = None
        if seq.params.logprobs is not None:
            likely = seq.parts.logprobs.since(seq, start, self._tokenizer)
        return StreamEvent(
            index=index,
            sample=seq.index,
            request_id=seq.request_id,
            text=text,
            token_ids=seq.token_ids[start:end],
            finish_reason=reason,
            stop_reason=stop,
            logprobs=likely,
        )
