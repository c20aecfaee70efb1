"""When things happened to a request. It knows times alone, in seconds of one clock."""

import time
from dataclasses import dataclass, field

from nanovllm.outputs import RequestMetrics


@dataclass(slots=True)
class RequestTimes:
    """Of one request: when it came, was first scheduled, had its first token, ended."""

    arrived: float = field(default_factory=time.perf_counter)
    scheduled: float | None = None
    first_token: float | None = None
    ended: float | None = None

    def metrics(self, num_output_tokens: int) -> RequestMetrics:
        """How long a request took; None for what never came. An interrupt may hide its end."""
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
