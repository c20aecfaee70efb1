"""The scheduler's time in a decode step: schedule() + postprocess() with many running sequences.

    python benchmarks/scheduler_step.py [--against DIR]

There is no model and no tensor: the sampled tokens come from a list. Prompt lengths differ by one
token each, so that every step has about the same number of sequences that enter a new block and of
blocks to hash. No sequence finishes. The host spends this time between any two decode steps; the
device takes some milliseconds for one.

`--against DIR` names a checkout of the nano-vllm project. Its sequence, block manager and scheduler
are loaded under another package name, with a stub for its config module, which needs a model
directory. Both schedulers take turns with the same workload in the same run.
"""

import argparse
import gc
import inspect
import json
import os
import platform
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.schedule.scheduler import Scheduler
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

MIN_PROMPT_LEN = 100
RIVAL = "rival_nanovllm"
NO_EOS = -1  # no token has this id
RIVAL_MODULES = ("sampling_params", "engine.sequence", "engine.block_manager", "engine.scheduler")

Step = Callable[[], None]
Book = Callable[[list[Any], list[int], bool], Any]


def prompts(num_seqs: int) -> list[list[int]]:
    """Prompts without common prefixes; each is one token longer than the one before."""
    return [
        list(range(index * 10_000, index * 10_000 + MIN_PROMPT_LEN + index))
        for index in range(num_seqs)
    ]


def pool_blocks(num_seqs: int, num_steps: int, block_size: int) -> int:
    """Blocks for all sequences at their full length: no sequence is preempted."""
    longest = MIN_PROMPT_LEN + num_seqs + num_steps
    return num_seqs * -(-longest // block_size)


def our_step(num_seqs: int, num_steps: int, block_size: int) -> Step:
    """Prefill our scheduler, and return its decode step."""
    num_blocks = pool_blocks(num_seqs, num_steps, block_size)
    config = Config(
        "no model", max_num_seqs=num_seqs, kvcache_block_size=block_size, overlap=False,
        max_num_batched_tokens=16384,
    )  # fmt: skip
    settled = EngineConfig.settle(config, num_blocks, max_model_len=num_blocks * block_size)
    scheduler = Scheduler(settled)
    params = SamplingParams(max_tokens=num_steps + 2, ignore_eos=True)
    for prompt in prompts(num_seqs):
        scheduler.add(Sequence(prompt, params))
    tokens = list(range(num_seqs))
    while scheduler.waiting or any(seq.num_uncached_tokens > 1 for seq in scheduler.running):
        batch = scheduler.schedule()
        scheduler.postprocess(batch, tokens[: len(batch.sampling_seqs)])

    def step() -> None:
        scheduler.postprocess(scheduler.schedule(), tokens)

    return step


def load_rival(checkout: Path) -> dict[str, types.ModuleType]:
    """The other nano-vllm's modules, by their names in its package."""
    stub = types.ModuleType(f"{RIVAL}.config")
    stub.Config = types.SimpleNamespace  # type: ignore[attr-defined]
    modules = {"config": stub}
    for package in (RIVAL, f"{RIVAL}.engine"):
        sys.modules[package] = types.ModuleType(package)
    sys.modules[stub.__name__] = stub
    for name in RIVAL_MODULES:
        path = checkout / "nanovllm" / f"{name.replace('.', '/')}.py"
        source = path.read_text().replace("from nanovllm.", f"from {RIVAL}.")
        modules[name] = module = types.ModuleType(f"{RIVAL}.{name}")
        sys.modules[module.__name__] = module
        exec(compile(source, str(path), "exec"), module.__dict__)
    return modules


def rival_scheduler(
    modules: dict[str, types.ModuleType], num_seqs: int, block_size: int, num_blocks: int,
    eos: int = NO_EOS,
) -> tuple[Any, Book]:  # fmt: skip
    """The other scheduler, and a function that books a step's sequences, tokens and kind.

    Only versions with chunked prefill use the kind: whether the step was a prefill.
    """
    modules["engine.sequence"].Sequence.block_size = block_size
    config = modules["config"].Config(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=16384,
        eos=eos,
        kvcache_block_size=block_size,
        num_kvcache_blocks=num_blocks,
    )
    scheduler = modules["engine.scheduler"].Scheduler(config)
    book = scheduler.postprocess
    if len(inspect.signature(book).parameters) == 3:
        return scheduler, book
    return scheduler, lambda seqs, tokens, _: book(seqs, tokens)


def rival_step(
    modules: dict[str, types.ModuleType], num_seqs: int, num_steps: int, block_size: int
) -> Step:
    """Prefill the other scheduler, and return its decode step."""
    num_blocks = pool_blocks(num_seqs, num_steps, block_size)
    scheduler, book = rival_scheduler(modules, num_seqs, block_size, num_blocks)
    sequence = modules["engine.sequence"].Sequence
    params = modules["sampling_params"].SamplingParams(max_tokens=num_steps + 2, ignore_eos=True)
    for prompt in prompts(num_seqs):
        scheduler.add(sequence(prompt, params))
    tokens = list(range(num_seqs))

    def step() -> None:
        seqs, is_prefill = scheduler.schedule()
        book(seqs, tokens, is_prefill)

    while scheduler.waiting:
        step()
    return step


def microseconds(steps: dict[str, Step], num_steps: int) -> dict[str, dict[str, float]]:
    """Time the steps in turn, so that a busy machine slows both alike."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    for _ in range(num_steps):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {
        name: {
            "median": round(statistics.median(values), 1),
            "mean": round(statistics.fmean(values), 1),
            "p90": round(statistics.quantiles(values, n=10)[-1], 1),
        }
        for name, values in times.items()
    }


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num-seqs", type=int, default=256, metavar="N")
    parser.add_argument("--num-steps", type=int, default=600, metavar="N")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 256], metavar="N")
    parser.add_argument("--against", type=Path, metavar="DIR", help="a checkout of nano-vllm")
    return parser.parse_args()


def main() -> None:
    """Measure each block size; print a table and one JSON line."""
    args = parse_args()
    rival = load_rival(args.against) if args.against else None
    processor = platform.processor() or platform.machine()
    result: dict[str, Any] = {
        "benchmark": "scheduler_step",
        "machine": f"{processor}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "num_seqs": args.num_seqs,
        "num_steps": args.num_steps,
        "unit": "us per decode step",
    }
    print(f"schedule() + postprocess(), {args.num_seqs} running sequences, us per decode step")
    print(f"{'block size':>10} {'':12} {'median':>8} {'mean':>8} {'p90':>8}")
    for block_size in args.block_sizes:
        workload = (args.num_seqs, args.num_steps, block_size)
        steps = {"nanovllm": our_step(*workload)}
        if rival:
            steps["nano-vllm"] = rival_step(rival, *workload)
        figures = microseconds(steps, args.num_steps)
        for name, row in figures.items():
            print(f"{block_size:>10} {name:12}" + "".join(f" {v:>8.1f}" for v in row.values()))
        result[f"block_size_{block_size}"] = figures
        if rival:
            ours, theirs = figures.values()
            ratio = {key: round(theirs[key] / ours[key], 2) for key in ours}
            print(f"{'':10} {'ratio':12}" + "".join(f" {v:>8.2f}" for v in ratio.values()))
            figures["ratio"] = ratio
    print(json.dumps(result))


if __name__ == "__main__":
    main()
