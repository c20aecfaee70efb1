"""What an exchange between ranks costs on the CPU: through shared memory, and by gloo.

    python benchmarks/exchange.py [--ranks 2]

Processes of one thread add tensors up, again and again. Told are the medians of microseconds that
rank 0 spends on one exchange, and their quartiles; the two take turns. With `--work` every rank
computes for as many microseconds before each exchange, as in a model.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from nanovllm.engine.ranks.join import join
from nanovllm.layers.ranks import Ranks

dist: Any = torch.distributed
SHAPES = [(1, 1024), (16, 1024), (64, 1024), (512, 1024), (4096, 1024)]  # of bfloat16
MAX_BYTES = 1 << 30  # that one turn exchanges


class GlooRanks(Ranks):
    """What PyTorch has for it. `place` is the port of a store."""

    def __init__(self, rank: int, size: int, place: int | None = None) -> None:
        super().__init__(rank, size)
        self.fds: tuple[int, ...] = ()
        listener = {}
        if place is None:
            mine = socket.create_server(("127.0.0.1", 0))
            place, listener = mine.getsockname()[1], dict(master_listen_fd=mine.detach())
        self.place = place
        self.store = dist.TCPStore(
            "127.0.0.1", place, size, is_master=rank == 0, wait_for_workers=False, **listener
        )
        self.group: Any = None

    def connect(self) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(minutes=5)
        self.group = dist.ProcessGroupGloo(self.store, self.rank, self.size, options)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Look for the end, as an engine would: gloo's own wait sleeps, which takes longer."""
        work = self.group.allreduce([x], dist.AllreduceOptions())
        while not work.is_completed():
            os.sched_yield()
        work.wait()
        return x

    def close(self) -> None:
        self.group = self.store = None


def make_ranks(kind: str, rank: int, size: int, place: int | None = None) -> Any:
    """Become a rank of either kind."""
    return GlooRanks(rank, size, place) if kind == "gloo" else join(rank, size, "cpu", place)


def exchange(ranks: Any, shape: tuple[int, int], times: int, work_us: float) -> list[float]:
    """Add up `times` tensors; return the microseconds of each."""
    spent = []
    x = torch.zeros(shape, dtype=torch.bfloat16)
    for _ in range(times):
        until = time.perf_counter_ns() + work_us * 1e3
        while time.perf_counter_ns() < until:
            pass
        start = time.perf_counter_ns()
        ranks.all_reduce(x)
        spent.append((time.perf_counter_ns() - start) / 1e3)
    return spent


def time_exchanges(kind: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """One turn: for each shape its quartiles, among processes that are started for it."""
    ranks = make_ranks(kind, 0, args.ranks)
    numbers = [ranks.place, args.ranks, args.steps, args.work]
    command = [sys.executable, __file__, "--join", kind, *map(str, numbers)]
    others = [
        subprocess.Popen([*command, str(rank)], pass_fds=ranks.fds) for rank in range(1, args.ranks)
    ]
    results = run(ranks, args.steps, args.work)
    for process in others:
        process.wait()
    ranks.close()
    return results


def run(ranks: Any, steps: int, work_us: float) -> dict[str, list[float]]:
    """What every rank does."""
    torch.set_num_threads(1)
    ranks.connect()
    results = {}
    for shape in SHAPES:
        times = max(20, min(steps, MAX_BYTES // (2 * shape[0] * shape[1])))
        exchange(ranks, shape, 10, work_us)
        spent = exchange(ranks, shape, times, work_us)
        results["x".join(map(str, shape))] = statistics.quantiles(spent, n=4)
    return results


def main() -> None:
    """Print a line for each shape, and one of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="exchanges a turn")
    parser.add_argument("--work", type=float, default=0.0, metavar="US", help="between exchanges")
    parser.add_argument("--turns", type=int, default=3, metavar="N")
    parser.add_argument("--join", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.join:
        kind, place, size, steps, work, rank = args.join
        run(make_ranks(kind, int(rank), int(size), int(place)), int(steps), float(work))
        return
    kinds = ("shared", "gloo")
    turns: dict[str, list[dict[str, list[float]]]] = {kind: [] for kind in kinds}
    for _ in range(args.turns):
        for kind in kinds:
            turns[kind].append(time_exchanges(kind, args))
    middle = {
        kind: {
            shape: [statistics.median(turn[shape][i] for turn in turns[kind]) for i in range(3)]
            for shape in turns[kind][0]
        }
        for kind in kinds
    }
    for shape in middle["shared"]:
        words = [
            f"{kind} {middle[kind][shape][1]:8.1f} us"
            f" ({middle[kind][shape][0]:.1f} to {middle[kind][shape][2]:.1f})"
            for kind in kinds
        ]
        print(f"{shape:>10}: {', '.join(words)}")
    print(json.dumps({"ranks": args.ranks, "work": args.work, "microseconds": middle}))


if __name__ == "__main__":
    main()
