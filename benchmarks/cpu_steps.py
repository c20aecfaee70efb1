"""Decode steps on a CPU: their time with quiet cores, and while other processes use cores.

    python benchmarks/cpu_steps.py [--shape qwen3-0.6b] [--num-seqs 1 16] [--threads 4] [--busy 2]
    PYTHONPATH=~/older python benchmarks/cpu_steps.py ...     # of another version

Requests of 16 tokens, random bf16 weights. Reported are the median and the quartiles of the steps,
in milliseconds, and how many cores the process used. Each busy process computes on one core.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.bench.shapes import write_shape

PROMPT_LEN = 16
WARM_UP = 3  # steps


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that never wait."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def time_steps(llm: LLM, num_seqs: int, num_steps: int) -> tuple[list[float], float]:
    """Milliseconds of each decode step of requests that start together, and the cores in use."""
    params = SamplingParams(temperature=0.6, max_tokens=num_steps + WARM_UP, ignore_eos=True)
    for index in range(num_seqs):
        llm.add_request([index + 1] * PROMPT_LEN, params)
    for _ in range(WARM_UP):
        llm.step()
    times = []
    start, start_cpu = time.perf_counter(), time.process_time()
    while not llm.is_finished():
        begin = time.perf_counter()
        llm.step()
        times.append(1e3 * (time.perf_counter() - begin))
    return times, (time.process_time() - start_cpu) / (time.perf_counter() - start)


def measure(shape: str, counts: list[int], num_steps: int, busy: int) -> list[dict[str, Any]]:
    """Print a line for each number of requests, and return what is in it."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        write_shape(shape, Path(folder))
        llm = LLM(folder, load_format="dummy", device="cpu", max_model_len=2048)
        for num_seqs in counts:
            time_steps(llm, num_seqs, WARM_UP)
            with busy_processes(busy):
                times, cores = time_steps(llm, num_seqs, num_steps)
            low, median, high = statistics.quantiles(times, n=4)
            results.append({"requests": num_seqs, "ms": median, "quartiles": (low, high)})
            print(f"{shape} {num_seqs:4} requests, {busy} busy processes: {median:8.2f} ms"
                  f" ({low:.2f} to {high:.2f}), {cores:.1f} cores", flush=True)  # fmt: skip
    return results


def main() -> None:
    """Print the lines, and one of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="qwen3-0.6b", metavar="NAME")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 16], metavar="N")
    parser.add_argument("--steps", type=int, default=40, metavar="N")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N")
    parser.add_argument("--busy", type=int, default=0, metavar="N")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = measure(args.shape, args.num_seqs, args.steps, args.busy)
    print(json.dumps({"benchmark": "cpu_steps", "threads": args.threads, "busy": args.busy,
                      "points": results}))  # fmt: skip


if __name__ == "__main__":
    main()
