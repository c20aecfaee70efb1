"""Draw the times at which requests are sent."""

import math
import random
from itertools import accumulate

from nanovllm.bench.serve.options import ServerLoad


def arrival_times(load: ServerLoad, number: int) -> list[float]:
    """Seconds from the start at which requests are sent; the first one is sent at once.

    The times between them are drawn from a gamma distribution and then scaled, so that every run
    has exactly the requested rate.
    """
    if load.request_rate == math.inf or number == 1:
        return [0.0] * number
    rng = random.Random(f"arrivals {load.seed}")
    gaps = [rng.gammavariate(load.burstiness, 1.0) for _ in range(number - 1)]
    scale = (number - 1) / load.request_rate / (sum(gaps) or 1.0)
    return [0.0, *(scale * time for time in accumulate(gaps))]
