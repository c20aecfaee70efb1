"""Metrics of an engine, in the shapes and by the names that vLLM gives them.

`LLM.get_metrics` returns them. Those of requests count the requests that have ended.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import get_args

from nanovllm.outputs import EngineStats, FinishReason, RequestMetrics

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0,
    250.0, 500.0, 1000.0,
)  # fmt: skip
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


@dataclass(frozen=True)
class Metric:
    """A named measurement; those of one name differ in their `labels`."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A number that never falls."""

    value: int


@dataclass(frozen=True)
class Gauge(Metric):
    """A number that rises and falls."""

    value: float


@dataclass(frozen=True)
class Vector(Metric):
    """Counters by position: the accepted drafts."""

    values: list[int]


@dataclass(frozen=True)
class Histogram(Metric):
    """How many values were measured, their sum, and how many were at most each bucket's key."""

    count: int
    sum: float
    buckets: dict[str, int]


def draft_metrics(
    model: str, num_drafts: int, num_drafted: int, accepted_at: list[int]
) -> list[Metric]:
    """The metrics of speculation: times that a sequence had drafts, tokens, those accepted."""
    labels, prefix = {"model_name": model}, "vllm:spec_decode_num"
    return [
        Counter(f"{prefix}_drafts", labels, num_drafts),
        Counter(f"{prefix}_draft_tokens", labels, num_drafted),
        Counter(f"{prefix}_accepted_tokens", labels, sum(accepted_at)),
        Vector(f"{prefix}_accepted_tokens_per_pos", labels, list(accepted_at)),
    ]


class Measured:
    """The values that a histogram shows, as counts between `bounds`."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float | None) -> None:
        """Count a value; None is one that a request does not have."""
        if value is not None:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.sum += value

    def histogram(self, name: str, labels: dict[str, str]) -> Histogram:
        """What was counted so far."""
        keys = [*map(str, self.bounds), "+Inf"]
        totals = list(accumulate(self.counts))
        return Histogram(name, labels, totals[-1], self.sum, dict(zip(keys, totals, strict=True)))


class RequestMeter:
    """What is measured of requests when they end."""

    def __init__(self) -> None:
        self.reasons: dict[FinishReason, int] = dict.fromkeys(get_args(FinishReason), 0)
        self.queue, self.first_token, self.each_token, self.whole = (
            Measured(SECONDS) for _ in range(4)
        )
        self.prompt_tokens, self.generated_tokens = Measured(TOKENS), Measured(TOKENS)

    def add(
        self,
        metrics: RequestMetrics,
        num_prompt_tokens: int,
        samples: Iterable[tuple[int, FinishReason]],
    ) -> None:
        """Count a request; `samples` are the numbers of tokens and the endings of its samples."""
        self.queue.add(metrics.queue_time)
        self.first_token.add(metrics.time_to_first_token)
        self.each_token.add(metrics.time_per_output_token)
        self.whole.add(metrics.end_to_end_time)
        self.prompt_tokens.add(num_prompt_tokens)
        for num_tokens, reason in samples:
            self.generated_tokens.add(num_tokens)
            self.reasons[reason] += 1

    def metrics(self, stats: EngineStats, model: str) -> list[Metric]:
        """All metrics of an engine with these statistics."""
        labels = {"model_name": model}
        gauges = {
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "kv_cache_usage_perc": stats.blocks_used / stats.num_blocks,
        }
        counters = {
            "num_preemptions": stats.num_preemptions,
            "prefix_cache_queries": stats.prefix_cache_queries,
            "prefix_cache_hits": stats.prefix_cache_hits,
            "prompt_tokens": int(self.prompt_tokens.sum),
            "generation_tokens": int(self.generated_tokens.sum),
        }
        histograms = {
            "request_queue_time_seconds": self.queue,
            "time_to_first_token_seconds": self.first_token,
            "request_time_per_output_token_seconds": self.each_token,
            "e2e_request_latency_seconds": self.whole,
            "request_prompt_tokens": self.prompt_tokens,
            "request_generation_tokens": self.generated_tokens,
        }
        return [
            *(Gauge(f"vllm:{name}", labels, value) for name, value in gauges.items()),
            *(Counter(f"vllm:{name}", labels, value) for name, value in counters.items()),
            *(
                Counter("vllm:request_success", {**labels, "finished_reason": reason}, number)
                for reason, number in self.reasons.items()
            ),
            *(one.histogram(f"vllm:{name}", labels) for name, one in histograms.items()),
        ]
