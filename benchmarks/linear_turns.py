"""What the benchmarks of the CPU's linear layers share: shapes, options, and products in turns."""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

# Qwen3-0.6B: queries, keys and values; attention's output; both halves of the feed-forward; head.
SHAPES = "4096x1024,1024x2048,6144x1024,1024x3072,151936x1024"

Call = Callable[[torch.Tensor], Any]


def sizes(text: str) -> list[tuple[int, int]]:
    """Parse shapes, NxK, with commas between them."""
    return [(int(out), int(in_)) for out, _, in_ in (s.partition("x") for s in text.split(","))]


def linear_parser(doc: str | None, rows: str, rounds: int, what: str) -> argparse.ArgumentParser:
    """A parser of the options of both; `what` has copies that take as many megabytes as asked."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--shapes", type=sizes, default=sizes(SHAPES), metavar="NxK,...")
    parser.add_argument("--rows", default=rows, metavar="N,...",
                        type=lambda text: [int(n) for n in text.split(",")])  # fmt: skip
    parser.add_argument("--rounds", type=int, default=rounds, metavar="N")
    parser.add_argument("--megabytes", type=int, default=400, metavar="N",
                        help=f"of each {what}'s weights")  # fmt: skip
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N")
    return parser


def measure(
    calls: dict[str, list[Call]], x: torch.Tensor, rounds: int, most: int | None, pause: float = 0.0
) -> dict[str, list[float]]:
    """Microseconds of a layer in each round; the first round warms up.

    A turn has up to `most` calls, or all. After a `pause` of seconds, in which the threads of the
    turn before go to sleep, one more call comes first.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(-1, rounds):
        for name, all_ in calls.items():
            some = all_[:most]
            if pause:
                time.sleep(pause)
                some[0](x)
            start = time.perf_counter()
            for call in some:
                call(x)
            if index >= 0:
                times[name].append(1e6 * (time.perf_counter() - start) / len(some))
    return times
