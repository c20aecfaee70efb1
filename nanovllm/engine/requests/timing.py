"""RequestTimes: when a request arrived, was scheduled, had its first token and ended."""

import time
from dataclasses import dataclass, field

from nanovllm.outputs import RequestMetrics


@dataclass(slots=True)
class RequestTimes:
    """Times of one request, in seconds of one clock; None for what has not happened."""

    arrived: float = field(default_factory=time.perf_counter)
    scheduled: float | None = None
    first_token: float | None = None
    ended: float | None = None

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
        )
