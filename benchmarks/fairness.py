"""How long tokens wait with each kind of scheduling, and what that costs; without a model.

    python benchmarks/fairness.py [--model 0.6b] [--rate 20] [--max-num-batched-tokens 16384]

Two workloads run through the scheduler. "at once": 256 requests of 100 to 1,024 tokens in and out,
as those of bench.py. "served": requests that arrive at random; one of 20 prompts is long. A clock
adds up the estimated times of the steps: see `Costs`. Gaps are the times between two tokens of a
request, in milliseconds, first tokens the times since its arrival.
"""

import argparse
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from nanovllm.config import Config
from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.schedule.scheduler import Scheduler
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

SCHEDULING = ("prefill-first", "fair", "mixed")
BLOCK_SIZE, NUM_BLOCKS = 256, 6000
LONG = 2048  # tokens of a prompt


class Costs(NamedTuple):
    """Estimated times of steps; those with prompts as before short prefills were graphs."""

    decode_ms: float  # a decode step without its rows
    row_us: float  # each row of it
    kv_ns: float  # each token of KV that decoding rows read
    prefill_ms: float  # a step with prompts, at least
    token_us: float  # each token of prompts


MODELS = {"0.6b": Costs(1.0, 5.0, 27.0, 10.4, 2.2), "8b": Costs(4.5, 24.0, 35.0, 10.8, 27.0)}

Request = tuple[float, int, int]  # arrival in seconds, tokens in, tokens out


def at_once(rng: random.Random, number: int) -> list[Request]:
    """The requests of bench.py."""
    return [(0.0, rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(number)]


def served(rng: random.Random, rate: float, seconds: float) -> Iterator[Request]:
    """Requests at random times: chats, and some long documents."""
    now = rng.expovariate(rate)
    while now < seconds:
        is_long = rng.random() < 0.05
        yield now, rng.randint(8000, 30_000) if is_long else rng.randint(50, 1000), \
            rng.randint(50, 400)  # fmt: skip
        now += rng.expovariate(rate)


class Run:
    """Requests that run through a scheduler, and the clock."""

    def __init__(self, costs: Costs, **options: Any) -> None:
        config = Config("no model", kvcache_block_size=BLOCK_SIZE, overlap=False,
                        max_num_seqs=512, enable_prefix_caching=False, **options)  # fmt: skip
        length = NUM_BLOCKS * BLOCK_SIZE
        self.scheduler = Scheduler(EngineConfig.settle(config, NUM_BLOCKS, max_model_len=length))
        self.costs, self.now = costs, 0.0
        self.last: dict[Sequence, float] = {}  # when each got its last token, or arrived
        self.gaps: list[float] = []
        self.first: dict[bool, list[float]] = {False: [], True: []}  # by whether a prompt is long
        self.prefills: list[int] = []  # tokens of prompts in each step with some
        self.decodes: list[int] = []  # rows of each step without prompts

    def run(self, requests: list[Request]) -> None:
        """Run all requests to their ends."""
        left = requests[::-1]
        while left or not self.scheduler.is_finished():
            while left and (left[-1][0] <= self.now or self.scheduler.is_finished()):
                arrival, num_in, num_out = left.pop()
                self.now = max(self.now, arrival)
                params = SamplingParams(max_tokens=num_out, ignore_eos=True)
                self.scheduler.add(seq := Sequence([1] * num_in, params))
                self.last[seq] = arrival
            self.step()

    def step(self) -> None:
        """Run a step, and record what it does and when its tokens come."""
        batch = self.scheduler.schedule()
        rows = batch.seqs[: batch.num_decodes]
        num_tokens = sum(seq.num_scheduled_tokens for seq in batch.seqs) - len(rows)
        (self.prefills if num_tokens else self.decodes).append(num_tokens or len(rows))
        costs = self.costs
        kv = sum(seq.num_tokens for seq in rows) * costs.kv_ns / 1e6
        decode = kv + (costs.decode_ms + len(rows) * costs.row_us / 1e3 if rows else 0.0)
        prefill = max(costs.prefill_ms, num_tokens * costs.token_us / 1e3) if num_tokens else 0.0
        # A mixed step reads the weights once: its rows are more tokens of the prompts' products.
        both = max(prefill, (num_tokens + len(rows)) * costs.token_us / 1e3) + kv
        self.now += (both if rows and num_tokens else decode + prefill) / 1e3
        for seq in batch.sampling_seqs:
            waited = self.now - self.last[seq]
            is_first = seq.num_tokens == seq.num_prompt_tokens
            (self.first[seq.num_prompt_tokens > LONG] if is_first else self.gaps).append(waited)
            self.last[seq] = self.now
        self.scheduler.postprocess(batch, [1] * len(batch.sampling_seqs))

    def figures(self) -> dict[str, Any]:
        """The results."""
        num_out = len(self.gaps) + sum(map(len, self.first.values()))
        return {
            "seconds": round(self.now, 2), "tok/s": round(num_out / self.now),
            "prefill steps": len(self.prefills), "tokens each": mean(self.prefills),
            "decode steps": len(self.decodes), "rows each": mean(self.decodes),
            "gap": percentiles(self.gaps), "first token": percentiles(self.first[False]),
            "first of long": percentiles(self.first[True]),
        }  # fmt: skip


def mean(values: list[int]) -> int:
    """The mean, rounded."""
    return round(sum(values) / max(1, len(values)))


def percentiles(seconds: list[float]) -> str:
    """The median, the 99th percentile and the largest, in milliseconds."""
    ordered = sorted(seconds) or [0.0]
    places = (len(ordered) // 2, len(ordered) * 99 // 100, len(ordered) - 1)
    return "/".join(f"{1e3 * ordered[place]:.0f}" for place in places)


def main() -> None:
    """Run both workloads with each kind of scheduling; print tables and one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="0.6b")
    parser.add_argument("--num-seqs", type=int, default=256, metavar="N")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second", metavar="X")
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals", metavar="X")
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384, metavar="N")
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "fairness", **vars(args)}
    for name in ("at once", "served"):
        for scheduling in SCHEDULING:
            rng = random.Random(0)
            requests = at_once(rng, args.num_seqs)
            if name == "served":
                requests = [*served(rng, args.rate, args.seconds)]
            run = Run(MODELS[args.model], scheduling=scheduling,
                      max_num_batched_tokens=args.max_num_batched_tokens)  # fmt: skip
            run.run(requests)
            result[f"{name}, {scheduling}"] = figures = run.figures()
            print(f"{name}, {scheduling}:", *(f"{key} {value};" for key, value in figures.items()))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
