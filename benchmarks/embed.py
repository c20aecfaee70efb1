"""Compare the speed of `embed` and of the same prompts' prefill.

    python benchmarks/embed.py [--shape qwen3-0.6b] [--rounds 7] [--loads 64x2000,256x512,...]

Prefill is `generate` with one greedy token. Both compute the same random prompts, in turns, with
random weights. A line of JSON for each load, a number of prompts and their length, has the medians
in tokens per second, and the median of the turns' ratios.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.bench.shapes import SHAPES, write_shape
from nanovllm.utils.resources import keep_what_lives

LOADS = "64x2000,256x512,512x128,1024x32"
ONE = SamplingParams(temperature=0, max_tokens=1)


def measure(llm: LLM, number: int, length: int, rounds: int, vocab_size: int) -> dict[str, Any]:
    """Compute `number` prompts of `length` tokens in turns."""
    rng = random.Random(0)
    prompts = [rng.choices(range(vocab_size), k=length) for _ in range(number)]
    calls: dict[str, Callable[[], Any]] = {
        "embed": lambda: llm.embed(prompts, use_tqdm=False),
        "prefill": lambda: llm.generate(prompts, ONE, use_tqdm=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name in rng.sample([*calls], len(calls)):
            start = time.perf_counter()
            outputs = calls[name]()
            seconds[name].append(time.perf_counter() - start)
            del outputs  # not within the time: freeing a million floats takes milliseconds
    turns = list(zip(*(taken[1:] for taken in seconds.values()), strict=True))  # the first warms up
    medians = [statistics.median(column) for column in zip(*turns, strict=True)]
    speeds = {name: round(number * length / m) for name, m in zip(calls, medians, strict=True)}
    ratio = statistics.median(prefill / embed for embed, prefill in turns)
    return {"prompts": number, "tokens": length, **speeds, "ratio": round(ratio, 3)}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--loads", default=LOADS, metavar="NxLEN,...")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_shape(args.shape, Path(directory))
        llm = LLM(directory, load_format="dummy", max_model_len=4096, enable_prefix_caching=False)
        with llm:
            keep_what_lives()  # as the server does: searching it takes 0.1 s, in some turns
            for load in args.loads.split(","):
                number, length = map(int, load.split("x"))
                vocab_size = SHAPES[args.shape][6]
                print(json.dumps(measure(llm, number, length, args.rounds, vocab_size)), flush=True)


if __name__ == "__main__":
    main()
