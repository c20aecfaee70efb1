"""How long tokens wait while requests arrive, with each kind of scheduling; with a model.

    python benchmarks/arrivals.py [--shape qwen3-42m] [--rate 5] [--scheduling fair prefill-first]

Random weights. Requests arrive at random times, and are added between two steps of the engine. Of
the prompts, 8% have 3,000 to 6,000 tokens, the others 30 to 400; 20 to 100 tokens are generated.
Gaps are the times between two tokens of a request, in milliseconds, first tokens the times since
its arrival: the median, the 99th percentile and the largest.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from fairness import percentiles

from nanovllm import LLM, SamplingParams
from nanovllm.bench.shapes import SHAPES, write_shape

LONG = 1000  # tokens of a prompt

Arrival = tuple[float, list[int], SamplingParams]


def arrivals(rng: random.Random, rate: float, seconds: float) -> list[Arrival]:
    """The requests, the last one first."""
    found, now = [], rng.expovariate(rate)
    while now < seconds:
        length = rng.randint(3000, 6000) if rng.random() < 0.08 else rng.randint(30, 400)
        prompt = [rng.randint(1, 31_000) for _ in range(length)]
        params = SamplingParams(temperature=0.6, max_tokens=rng.randint(20, 100), ignore_eos=True)
        found.append((now, prompt, params))
        now += rng.expovariate(rate)
    return found[::-1]


def measure(llm: LLM, left: list[Arrival]) -> dict[str, Any]:
    """Run the requests as they arrive."""
    gaps: list[float] = []
    first: dict[bool, list[float]] = {False: [], True: []}  # by whether a prompt is long
    last: dict[Any, tuple[float, int]] = {}  # when a sequence got its last token, and its length
    start, start_cpu = time.perf_counter(), time.process_time()
    while left or not llm.is_finished():
        now = time.perf_counter() - start
        while left and left[-1][0] <= now:
            arrival, prompt, params = left.pop()
            llm.add_request(prompt, params)
            seq = llm.scheduler.waiting[-1]
            last[seq] = arrival, seq.num_tokens
        if llm.is_finished():
            time.sleep(0.001)
            continue
        llm.step()
        now = time.perf_counter() - start
        for seq, (since, length) in [*last.items()]:
            if seq.num_known_tokens > length:
                is_first = length == seq.num_prompt_tokens
                (first[length > LONG] if is_first else gaps).append(now - since)
                last[seq] = now, seq.num_known_tokens
            if seq.finish_reason is not None:
                del last[seq]
    return {
        "took": round(time.perf_counter() - start, 2),
        "processor_seconds": round(time.process_time() - start_cpu, 2),
        "gap": percentiles(gaps), "first_token": percentiles(first[False]),
        "first_of_long": percentiles(first[True]),
    }  # fmt: skip


def main() -> None:
    """Print one JSON line for each kind of scheduling."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-42m")
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second", metavar="X")
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals", metavar="X")
    parser.add_argument("--scheduling", nargs="+", default=["prefill-first", "fair"])
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="N")
    args = parser.parse_args()
    for scheduling in args.scheduling:
        with tempfile.TemporaryDirectory() as folder:
            model = write_shape(args.shape, Path(folder))
            llm = LLM(model, load_format="dummy", scheduling=scheduling,
                      max_num_batched_tokens=args.max_num_batched_tokens)  # fmt: skip
        with llm:
            llm.generate([[1] * 100], SamplingParams(max_tokens=8), use_tqdm=False)
            requests = arrivals(random.Random(1), args.rate, args.seconds)
            result = {"benchmark": "arrivals", **vars(args), "scheduling": scheduling}
            print(json.dumps(result | measure(llm, requests)), flush=True)


if __name__ == "__main__":
    main()
