"""Measures: times of requests, and sums over an engine's steps and requests."""

import time
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import get_args

from nanovllm.engine.schedule.batch import Batch
from nanovllm.outputs import FinishReason, RequestMetrics

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0,
    250.0, 500.0, 1000.0,
)  # fmt: skip
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


@dataclass(slots=True)
class RequestTimes:
    """Times of one request, in seconds of one clock; None for what has not happened."""

    arrived: float = field(default_factory=time.perf_counter)
    scheduled: float | None = None
    first_token: float | None = None
    ended: float | None = None
    num_preemptions: int = 0

    def metrics(self, num_output_tokens: int) -> RequestMetrics:
        """Durations; None for what has not happened. After an interrupt the end may be unset."""
        ended = time.perf_counter() if self.ended is None else self.ended
        first = self.first_token
        return RequestMetrics(
            queue_time=None if self.scheduled is None else self.scheduled - self.arrived,
            time_to_first_token=None if first is None else first - self.arrived,
            time_per_output_token=(
                None
                if first is None or num_output_tokens < 2
                else (ended - first) / (num_output_tokens - 1)
            ),
            end_to_end_time=ended - self.arrived,
            prefill_time=None if first is None else first - (self.scheduled or first),
            decode_time=None if first is None else ended - first,
            num_preemptions=self.num_preemptions,
        )


@dataclass(slots=True)
class StepCounter:
    """Tokens computed and seconds spent, by kind of step; requests ended; cache hits."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    cache_queries: int = 0
    cache_hits: int = 0

    def add(self, batch: Batch, tokens: int, seconds: float) -> None:
        """Count one step; a mixed step's time is divided in proportion to tokens without drafts."""
        decodes = batch.num_decodes
        self.drafted_tokens += batch.num_drafted
        self.accepted_tokens += batch.num_accepted
        self.decode_tokens += decodes + batch.num_accepted
        self.decode_seconds += seconds * decodes / tokens
        self.prefill_tokens += tokens - decodes
        self.prefill_seconds += seconds * (tokens - decodes) / tokens

    def tokens_per_step(self, before: "StepCounter") -> float:
        """The mean number of tokens of a sequence in a decode step since `before`."""
        tokens = self.decode_tokens - before.decode_tokens
        accepted = self.accepted_tokens - before.accepted_tokens
        return tokens / max(1, tokens - accepted)


class Measured:
    """The values that a histogram shows, as counts between `bounds`."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float | None) -> None:
        """Count a value; None, for a request without this value, is not counted."""
        if value is not None:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.sum += value


class RequestMeter:
    """Measurements of requests: times to the first token at once, all else at a request's end."""

    def __init__(self) -> None:
        self.reasons: dict[FinishReason, int] = dict.fromkeys(get_args(FinishReason), 0)
        self.queue, self.first_token, self.each_token, self.whole = (
            Measured(SECONDS) for _ in range(4)
        )
        self.prompt_tokens, self.generated_tokens = Measured(TOKENS), Measured(TOKENS)
        self._most_tokens = 0

    def add(
        self,
        metrics: RequestMetrics,
        num_prompt_tokens: int,
        samples: Iterable[tuple[int, FinishReason]],
    ) -> None:
        """Count the end of a request: each of its `samples` has a number of tokens and an end."""
        self.queue.add(metrics.queue_time)
        self.each_token.add(metrics.time_per_output_token)
        self.whole.add(metrics.end_to_end_time)
        self.prompt_tokens.add(num_prompt_tokens)
        for num_tokens, reason in samples:
            self.generated_tokens.add(num_tokens)
            self.reasons[reason] += 1

    def num_generated(self, running_tokens: int) -> int:
        """All tokens so far; requests that have not ended have generated `running_tokens`.

        A sequence may lose its last token, but a counter never falls.
        """
        now = int(self.generated_tokens.sum) + running_tokens
        self._most_tokens = max(self._most_tokens, now)
        return self._most_tokens
