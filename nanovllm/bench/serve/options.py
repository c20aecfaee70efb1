"""ServerLoad: which requests are sent to the server, and when. All values are checked here."""

import math
from dataclasses import dataclass
from typing import Any

from nanovllm.utils.checks import allowed_range, check_float
from nanovllm.utils.option import (
    NOTHING,
    TRUE_OR_FALSE,
    Rule,
    check_options,
    float_range,
    int_range,
    one_of,
    option,
)

COMPLETIONS, CHAT = "completions", "chat"
PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}
NUM_PROMPTS = 100


def _check_rate(name: str, value: Any) -> float:
    return value if value == math.inf else check_float(name, value, 0, above=True)


RATE = Rule(_check_rate, f"{allowed_range(0, None, above=True)}; inf sends all at once")


@dataclass(frozen=True)
class ServerLoad:
    """The requests of a run. The lengths apply to random prompts and to all answers."""

    num_prompts: int | None = option(
        None, "requests that are measured", int_range(1),
        none=f"{NUM_PROMPTS}, or the lines of the dataset",
    )  # fmt: skip
    input_len: int = option(1024, "tokens of a random prompt", int_range(1))
    output_len: int = option(128, "most tokens to generate", int_range(1))
    range_ratio: float = option(
        0.0,
        "lengths are drawn between the given one times (1 - range_ratio) and times"
        " (1 + range_ratio)",
        float_range(0, 1),
    )
    vocab_size: int | None = option(
        None, "random prompts are token ids below this", int_range(1),
        none="they are ids that the server's /tokenize makes, or text if it has none",
    )  # fmt: skip
    request_rate: float = option(math.inf, "requests that are sent in a second", RATE)
    burstiness: float = option(
        1.0,
        "shape of the gamma distribution of the times between requests: 1 is a Poisson process,"
        " less has more bursts, more is more even",
        float_range(0, above=True),
    )
    max_concurrency: int | None = option(
        None, "most requests in flight", int_range(1), none=NOTHING
    )
    num_warmups: int = option(1, "requests that are sent before and not measured", int_range(0))
    seed: int = option(0, "decides lengths, prompts and times", int_range(0))
    endpoint: str = option(COMPLETIONS, "what is asked", one_of(COMPLETIONS, CHAT))
    temperature: float | None = option(
        None, "of the samples", float_range(0), none="the server's default"
    )
    ignore_eos: bool = option(False, "generate all tokens, past the end of the text", TRUE_OR_FALSE)
    timeout: float = option(
        3600.0, "seconds after which a request has failed", float_range(0, above=True)
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.request_rate == math.inf and self.burstiness != 1:
            raise ValueError(f"burstiness={self.burstiness} needs a request_rate")
        if self.vocab_size is not None and self.endpoint == CHAT:
            raise ValueError(
                "vocab_size makes prompts of token ids, which endpoint='chat' does not take"
            )
