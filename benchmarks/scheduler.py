"""The cost of admission policies: steps, preemptions and recomputed tokens, without a model.

    python benchmarks/scheduler.py [--against DIR] [--pools N ...]

Requests of several kinds run through the scheduler on pools that hold only some of them. Output
lengths are drawn beforehand. A request ends by an EOS, or by `max_tokens` with `ignore_eos`, so
that its length is known. Three policies: ours, with its forecast; ours, admitting all that fit now;
and, with `--against DIR`, that of a checkout of the nano-vllm project. `work` is the number of
prefilled tokens divided by the number of prompt tokens.

Times are estimates for a 0.6B model on an H200: STEP_MS for a decode step without its reads of KV,
which are the same for all policies, and TOKEN_US for each prefilled token.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from scheduler_step import load_rival, rival_scheduler

from nanovllm.config import Config
from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.schedule import forecast
from nanovllm.engine.schedule.scheduler import Scheduler
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

BLOCK_SIZE = 256
MAX_NUM_SEQS = 512
MAX_NUM_BATCHED_TOKENS = 16384
EOS = 20_000  # in no prompt
ADMIT_ALL = {True: 0.0, False: 0.0}  # `forecast.WORTHWHILE` that admits all that fit
STEP_MS = 1.5
TOKEN_US = 1.2

Request = tuple[list[int], int, int]  # prompt, output length, max_tokens


class Figures(NamedTuple):
    """The result of a run."""

    prefills: int
    decodes: int
    preemptions: int
    work: float

    def seconds(self, num_prompt_tokens: int) -> float:
        """The estimated time of the run."""
        steps = self.prefills + self.decodes
        return steps * STEP_MS / 1e3 + self.work * num_prompt_tokens * TOKEN_US / 1e6


def workloads(rng: random.Random, num_seqs: int) -> Iterator[tuple[str, bool, list[Request]]]:
    """Yield workloads: a name, whether output lengths are known, and the requests."""
    prompts = [
        [rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(num_seqs)
    ]
    half = num_seqs // 2

    def requests(length: Callable[[], float], limit: int) -> list[Request]:
        lengths = [min(limit, max(1, int(length()))) for _ in prompts]
        return list(zip(prompts, lengths, [limit] * num_seqs, strict=True))

    uniform = requests(lambda: rng.randint(100, 1024), 1024)
    yield "uniform (bench.py), known", True, [(prompt, n, n) for prompt, n, _ in uniform]
    yield "1024, known", True, requests(lambda: 1024, 1024)
    yield "uniform", False, uniform
    yield "1024", False, requests(lambda: 1024, 1024)
    yield "exponential, mean 100", False, requests(lambda: rng.expovariate(1 / 100), 2048)
    yield "exponential, mean 400", False, requests(lambda: rng.expovariate(1 / 400), 1024)
    yield "log-normal, median 245", False, requests(lambda: rng.lognormvariate(5.5, 1.0), 4096)
    yield "20 or 1500", False, requests(lambda: rng.choice([20, 1500]), 2048)
    drift = requests(lambda: 1000, 1024)
    yield (
        "50, then 1000",
        False,
        [(prompt, 50, 1024) for prompt, _, _ in drift[:half]] + drift[half:],
    )


def our_scheduler(num_blocks: int) -> Scheduler:
    """Our scheduler without overlap."""
    config = Config(
        "no model", kvcache_block_size=BLOCK_SIZE, overlap=False,
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
    )  # fmt: skip
    settled = EngineConfig.settle(config, num_blocks, max_model_len=num_blocks * BLOCK_SIZE)
    return Scheduler(settled)


def run(
    requests: list[Request], known: bool, num_blocks: int, worthwhile: dict[bool, float]
) -> Figures:
    """Run our scheduler on a pool of `num_blocks` blocks."""
    forecast.WORTHWHILE = worthwhile
    scheduler = our_scheduler(num_blocks)
    ends: dict[int, int] = {}
    for prompt, length, limit in requests:
        params = SamplingParams(max_tokens=limit, ignore_eos=known)
        seq = Sequence(prompt, params, eos_token_ids=frozenset({EOS}))
        ends[seq.seq_id] = len(prompt) + length
        scheduler.add(seq)
    prefills = decodes = computed = 0
    while not scheduler.is_finished():
        batch = scheduler.schedule()
        prefills, decodes = prefills + batch.is_prefill, decodes + (not batch.is_prefill)
        if batch.is_prefill:
            computed += sum(seq.num_scheduled_tokens for seq in batch.seqs)
        tokens = [
            EOS if seq.num_tokens + 1 == ends[seq.seq_id] else 1 for seq in batch.sampling_seqs
        ]
        scheduler.postprocess(batch, tokens)
    work = computed / sum(len(prompt) for prompt, _, _ in requests)
    return Figures(prefills, decodes, scheduler.num_preemptions, work)


def run_rival(
    modules: dict[str, Any], requests: list[Request], known: bool, num_blocks: int
) -> Figures:
    """Run the other nano-vllm's scheduler on a pool of `num_blocks` blocks."""
    scheduler, book = rival_scheduler(modules, MAX_NUM_SEQS, BLOCK_SIZE, num_blocks, EOS)
    sequence = modules["engine.sequence"].Sequence
    ends: dict[int, int] = {}
    for prompt, length, limit in requests:
        params = modules["sampling_params"].SamplingParams(max_tokens=limit, ignore_eos=known)
        seq = sequence(prompt, params)
        ends[seq.seq_id] = len(prompt) + length
        scheduler.add(seq)
    preempted: list[Any] = []
    preempt = scheduler.preempt

    def counted(seq: Any) -> None:
        preempted.append(seq)
        preempt(seq)

    scheduler.preempt = counted
    prefills = decodes = computed = 0
    while not scheduler.is_finished():
        seqs, is_prefill = scheduler.schedule()
        prefills, decodes = prefills + is_prefill, decodes + (not is_prefill)
        if is_prefill:
            computed += sum(getattr(seq, "num_scheduled_tokens", 0) or
                            len(seq) - seq.num_cached_tokens for seq in seqs)  # fmt: skip
        tokens = [EOS if len(seq) + 1 == ends[seq.seq_id] else 1 for seq in seqs]
        book(seqs, tokens, is_prefill)
    work = computed / sum(len(prompt) for prompt, _, _ in requests)
    return Figures(prefills, decodes, len(preempted), work)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num-seqs", type=int, default=256, metavar="N")
    parser.add_argument("--pools", type=int, nargs="+", default=[150, 300, 700], metavar="N",
                        help=f"sizes, in blocks of {BLOCK_SIZE} tokens")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--against", type=Path, metavar="DIR", help="a checkout of nano-vllm")
    return parser.parse_args()


def main() -> None:
    """Run every workload on every pool; print a table and one JSON line."""
    args = parse_args()
    rival = load_rival(args.against) if args.against else {}
    policies = ["forecast", "all that fit", *(["nano-vllm"] if rival else [])]
    ours = forecast.WORTHWHILE
    result: dict[str, Any] = {"benchmark": "scheduler", **vars(args), "against": str(args.against)}
    print(f"{'workload':26} blocks policy        steps prefills preempted   work  seconds")
    for name, known, requests in workloads(random.Random(args.seed), args.num_seqs):
        num_prompt_tokens = sum(len(prompt) for prompt, _, _ in requests)
        for num_blocks in args.pools:
            for policy in policies:
                if policy == "nano-vllm":
                    figures = run_rival(rival, requests, known, num_blocks)
                else:
                    worthwhile = ours if policy == "forecast" else ADMIT_ALL
                    figures = run(requests, known, num_blocks, worthwhile)
                row = (f"{name:26}", f"{num_blocks:6}", f"{policy:12}",
                       f"{figures.prefills + figures.decodes:6}", f"{figures.prefills:8}",
                       f"{figures.preemptions:9}", f"{figures.work:6.3f}",
                       f"{figures.seconds(num_prompt_tokens):8.2f}")  # fmt: skip
                print(*row, flush=True)
                result[f"{name}, {num_blocks}, {policy}"] = figures._asdict()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
