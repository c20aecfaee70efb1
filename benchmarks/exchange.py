"""The time of an all-reduce between ranks on the CPU: through shared memory, and through gloo.

    python benchmarks/exchange.py [--ranks 2]

Processes with one thread each add up tensors many times. Reports the median and the quartiles of
the microseconds that rank 0 spends on one exchange. The two kinds take turns. With `--work US`,
every rank computes for that many microseconds before each exchange, as in a model.
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
KINDS = ("shared", "gloo")
SHAPES = [(1, 1024), (16, 1024), (64, 1024), (512, 1024), (4096, 1024)]  # bfloat16
MAX_BYTES = 1 << 30  # exchanged in one turn for each shape

Quartiles = dict[str, list[float]]  # three for each shape, in microseconds


class GlooRanks(Ranks):
    """Ranks that use PyTorch's gloo backend. `address` is the port of a store."""

    def __init__(self, rank: int, size: int, address: int | None = None) -> None:
        super().__init__(rank, size)
        self.fds: tuple[int, ...] = ()
        listener = {}
        if address is None:
            server = socket.create_server(("127.0.0.1", 0))
            address, listener = server.getsockname()[1], dict(master_listen_fd=server.detach())
        self.address = address
        self.store = dist.TCPStore(
            "127.0.0.1", address, size, is_master=rank == 0, wait_for_workers=False, **listener
        )
        self.group: Any = None

    def connect(self) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(minutes=5)
        self.group = dist.ProcessGroupGloo(self.store, self.rank, self.size, options)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Poll for the end, as an engine would: gloo's own wait sleeps, which takes longer."""
        work = self.group.allreduce([x], dist.AllreduceOptions())
        while not work.is_completed():
            os.sched_yield()
        work.wait()
        return x

    def close(self) -> None:
        self.group = self.store = None


def make_ranks(kind: str, rank: int, size: int, address: int | None = None) -> Any:
    """Join as a rank of either kind."""
    return GlooRanks(rank, size, address) if kind == "gloo" else join(rank, size, "cpu", address)


def exchange(ranks: Any, shape: tuple[int, int], times: int, work_us: float) -> list[float]:
    """Make `times` exchanges; return the microseconds of each."""
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


def time_exchanges(kind: str, args: argparse.Namespace) -> Quartiles:
    """Run one turn, in new processes."""
    ranks = make_ranks(kind, 0, args.ranks)
    numbers = [ranks.address, args.ranks, args.steps, args.work]
    command = [sys.executable, __file__, "--join", kind, *map(str, numbers)]
    others = [
        subprocess.Popen([*command, str(rank)], pass_fds=ranks.fds) for rank in range(1, args.ranks)
    ]
    results = run(ranks, args.steps, args.work)
    for process in others:
        process.wait()
    ranks.close()
    return results


def run(ranks: Any, steps: int, work_us: float) -> Quartiles:
    """Run one turn as one of its ranks."""
    torch.set_num_threads(1)
    ranks.connect()
    results = {}
    for shape in SHAPES:
        times = max(20, min(steps, MAX_BYTES // (2 * shape[0] * shape[1])))
        exchange(ranks, shape, 10, work_us)
        spent = exchange(ranks, shape, times, work_us)
        results["x".join(map(str, shape))] = statistics.quantiles(spent, n=4)
    return results


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="exchanges a turn")
    parser.add_argument("--work", type=float, default=0.0, metavar="US", help="between exchanges")
    parser.add_argument("--turns", type=int, default=3, metavar="N")
    parser.add_argument("--join", nargs=6, help=argparse.SUPPRESS)
    return parser.parse_args()


def median_quartiles(turns: list[Quartiles]) -> Quartiles:
    """For each shape, the median over the turns of each quartile."""
    return {
        shape: [statistics.median(turn[shape][i] for turn in turns) for i in range(3)]
        for shape in turns[0]
    }


def main() -> None:
    """Print a line for each shape, and one JSON line."""
    args = parse_args()
    if args.join:
        kind, address, size, steps, work, rank = args.join
        run(make_ranks(kind, int(rank), int(size), int(address)), int(steps), float(work))
        return
    turns: dict[str, list[Quartiles]] = {kind: [] for kind in KINDS}
    for _ in range(args.turns):
        for kind in KINDS:
            turns[kind].append(time_exchanges(kind, args))
    results = {kind: median_quartiles(turns[kind]) for kind in KINDS}
    for shape in results[KINDS[0]]:
        columns = []
        for kind in KINDS:
            low, median, high = results[kind][shape]
            columns.append(f"{kind} {median:8.1f} us ({low:.1f} to {high:.1f})")
        print(f"{shape:>10}: {', '.join(columns)}")
    print(json.dumps({"ranks": args.ranks, "work": args.work, "microseconds": results}))


if __name__ == "__main__":
    main()
