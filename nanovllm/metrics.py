"""Metrics of an engine, with vLLM's types, and its names where they mean the same.

`LLM.get_metrics` returns them. Metrics of requests count requests that have ended;
generated tokens, and times to the first one, are counted when they are generated.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A named measurement. Metrics of the same name have different `labels`."""

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
    """Counters by position: of accepted drafts."""

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
    """The metrics of speculation: steps of a sequence with drafts, drafts, accepted drafts."""
    labels, prefix = {"model_name": model}, "vllm:spec_decode_num"
    return [
        Counter(f"{prefix}_drafts", labels, num_drafts),
        Counter(f"{prefix}_draft_tokens", labels, num_drafted),
        Counter(f"{prefix}_accepted_tokens", labels, sum(accepted_at)),
        Vector(f"{prefix}_accepted_tokens_per_pos", labels, list(accepted_at)),
    ]
