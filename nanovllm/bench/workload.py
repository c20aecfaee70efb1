"""Random requests: lengths that are drawn, and tokens that mean nothing."""

import random
from dataclasses import dataclass

from nanovllm.utils.checks import check_int

MAX_TOKEN_ID = 10_000


@dataclass(frozen=True)
class Lengths:
    """How many requests there are, and between which bounds their lengths are drawn."""

    num_seqs: int = 256
    min_input_len: int = 100
    max_input_len: int = 1024
    min_output_len: int = 100
    max_output_len: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("seed", self.seed, 0)
        for name in ("num_seqs", "min_input_len", "min_output_len"):
            check_int(name, getattr(self, name), 1)
        for kind in ("input", "output"):
            low, high = getattr(self, f"min_{kind}_len"), getattr(self, f"max_{kind}_len")
            check_int(f"max_{kind}_len", high, 1)
            if high < low:
                raise ValueError(f"max_{kind}_len={high} is less than min_{kind}_len={low}")


@dataclass(frozen=True)
class Workload:
    """Prompts, and how many tokens to generate for each."""

    prompts: list[list[int]]
    output_lens: list[int]


def draw_workload(lengths: Lengths, vocab_size: int) -> Workload:
    """Draw the requests in the order in which nano-vllm's bench.py draws them."""
    rng = random.Random(lengths.seed)
    high = min(MAX_TOKEN_ID, vocab_size - 1)

    def draw_input_len() -> int:
        return rng.randint(lengths.min_input_len, lengths.max_input_len)

    prompts = [
        [rng.randint(0, high) for _ in range(draw_input_len())] for _ in range(lengths.num_seqs)
    ]
    output_lens = [
        rng.randint(lengths.min_output_len, lengths.max_output_len) for _ in range(lengths.num_seqs)
    ]
    return Workload(prompts, output_lens)
