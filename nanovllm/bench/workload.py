"""Random requests: random lengths, and random tokens, which may repeat themselves."""

import random
from dataclasses import dataclass

from nanovllm.utils.option import (
    NOTHING,
    TRUE_OR_FALSE,
    check_options,
    float_range,
    int_range,
    option,
)

MAX_TOKEN_ID = 10_000
MAX_MODEL_LEN = 4096  # unless the options or the model set less
TEMPERATURE = 0.6
PHRASE = 16  # tokens that a repetitive prompt repeats


@dataclass(frozen=True)
class WorkloadOptions:
    """The number of requests, and the limits of their lengths."""

    num_seqs: int = option(256, "requests", int_range(1))
    min_input_len: int = option(100, "shortest prompt", int_range(1))
    max_input_len: int = option(1024, "longest prompt", int_range(1))
    min_output_len: int = option(100, "fewest tokens to generate", int_range(1))
    max_output_len: int = option(1024, "most tokens to generate", int_range(1))
    seed: int = option(0, "decides the lengths and tokens of the requests", int_range(0))
    repetitive: bool = option(
        False,
        "prompts repeat a phrase, and the most likely tokens are generated, which repeat then, too:"
        " for n-grams to guess",
        TRUE_OR_FALSE,
    )
    acceptance: float | None = option(
        None,
        "probability that a draft is right if those before it are, in place of what the model"
        " draws: for the speed of speculation with random weights; needs --speculative-config",
        float_range(0, 1),
        none=NOTHING,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.repetitive and self.acceptance is not None:
            raise ValueError(
                "--repetitive and --acceptance exclude each other: with the latter drafts are"
                " right by chance, whatever the prompts are"
            )
        for kind in ("input", "output"):
            low, high = getattr(self, f"min_{kind}_len"), getattr(self, f"max_{kind}_len")
            if high < low:
                raise ValueError(f"max_{kind}_len={high} is less than min_{kind}_len={low}")

    @property
    def temperature(self) -> float:
        """The temperature at which outputs are drawn."""
        return 0.0 if self.repetitive else TEMPERATURE

    def check_fit(self, max_model_len: int) -> None:
        """Raise a ValueError if a request may be longer than `max_model_len`."""
        longest = self.max_input_len + self.max_output_len
        if longest > max_model_len:
            raise ValueError(
                f"max_input_len={self.max_input_len} and max_output_len={self.max_output_len} must"
                f" add up to at most max_model_len={max_model_len}, got {longest}"
            )


@dataclass(frozen=True)
class Workload:
    """Prompts, and the number of tokens to generate for each."""

    prompts: list[list[int]]
    output_lens: list[int]


def draw_workload(lengths: WorkloadOptions, vocab_size: int) -> Workload:
    """Draw the requests in the order in which nano-vllm's bench.py draws them."""
    rng = random.Random(lengths.seed)
    high = min(MAX_TOKEN_ID, vocab_size - 1)

    def draw_input_len() -> int:
        return rng.randint(lengths.min_input_len, lengths.max_input_len)

    prompts = [
        [rng.randint(0, high) for _ in range(draw_input_len())] for _ in range(lengths.num_seqs)
    ]
    if lengths.repetitive:
        prompts = [(prompt[:PHRASE] * len(prompt))[: len(prompt)] for prompt in prompts]
    output_lens = [
        rng.randint(lengths.min_output_len, lengths.max_output_len) for _ in range(lengths.num_seqs)
    ]
    return Workload(prompts, output_lens)
