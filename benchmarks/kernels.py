"""Each Triton kernel against its plain-PyTorch twin, flash-attn where it is installed, and physics.

    python benchmarks/kernels.py --json kernels.json
    python benchmarks/kernels.py --only decode_attention,sample
    TRITON_INTERPRET=1 python benchmarks/kernels.py --quick    # no GPU: does it all still run?

A point's floor is the time of the bytes that it must move at the rate of a large copy, or of its
FLOPs at the rate of a large linear layer; both rates are measured first. A copy reads as much as it
writes, so a kernel that mostly reads may be faster than its floor.

A kernel that differs from its twin is not timed. Times are the device's: launches come from a CUDA
graph. A twin that syncs cannot be captured, and its time, marked ~, includes the host's. Copies of
the inputs take turns, so that they are read from memory; if all of them may stay in the L2 cache,
like a model's activations, the floor is marked *.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from kernel_points import DEVICE, KERNELS, Call, Point, flash_attn, normal

from nanovllm.bench.roofline import Machine

TOLERANCE = 4 * 2.0**-7  # of a row's largest entry: four steps of bfloat16, at their widest
SAMPLES, SAMPLE_SECONDS = 9, 0.02
FEWEST_CALLS, MOST_COPIES = 8, 256  # in one graph
CACHES = 4  # the copies that take turns are this many times as large as the L2 cache


def seconds(run: Call, repeats: int = 1) -> float:
    """The mean time of `run`, by the device's own clock."""
    if DEVICE == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / repeats


def sample_seconds(run: Call) -> list[float]:
    """Several samples, each of as many runs as fill its time."""
    if DEVICE == "cpu":
        return [seconds(run)]
    seconds(run)  # warms up
    repeats = math.ceil(SAMPLE_SECONDS / seconds(run))
    return [seconds(run, repeats) for _ in range(SAMPLES)]


def call_all(calls: list[Call]) -> None:
    """Call one after the other, keeping all outputs, so that none reuses another's memory."""
    _ = [call() for call in calls]


def captured(calls: list[Call]) -> Call:
    """A CUDA graph of calls that have run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call_all(calls)
    return graph.replay


def measure_machine() -> Machine:
    """The rates of a copy and of a linear layer, both too large for any cache."""
    num_bytes, size = (1 << 30, 8192) if DEVICE == "cuda" else (1 << 20, 256)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=DEVICE)
    target = torch.zeros_like(source)
    # On the stream: in a graph, a copy becomes a node of its own kind, which is slower.
    copy = statistics.median(sample_seconds(lambda: target.copy_(source)))
    x, weight = normal(size, size), normal(size, size)
    matmul = statistics.median(sample_seconds(lambda: F.linear(x, weight)))
    return Machine(2 * num_bytes / copy, 2 * size**3 / matmul)


def max_error(out: Any, twin: Any) -> float:
    """The largest difference over its row's largest entry; of integers, how many differ."""
    if callable(out):
        out, twin = out(), twin()
    if isinstance(out, torch.Tensor):
        out, twin = (out,), (twin,)
    errors = []
    for a, b in zip(out, twin, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), (a.shape, a.dtype, b.shape, b.dtype)
        if b.is_floating_point():
            largest = b.float().abs().amax(-1).clamp(min=1e-9)  # rows of zeros are to be zeros
            errors.append(((a.float() - b.float()).abs().amax(-1) / largest).max())
        else:
            errors.append((a != b).float().mean())
    return float(torch.stack(errors).max())  # NaN, if there is one


def measure(point: Point, machine: Machine, cache_bytes: int) -> dict[str, Any]:
    """Verify a point and, if it is right, time each implementation."""
    copies = min(MOST_COPIES, math.ceil(CACHES * cache_bytes / point.num_bytes))
    sets = [point.make() for _ in range(max(1, copies))]
    outs = {who: call() for who, call in sets[0].items()}
    errors = {who: max_error(out, outs["twin"]) for who, out in outs.items() if who != "twin"}
    del outs
    bound = (point.num_bytes / machine.bytes_per_second, point.flops / machine.flops_per_second)
    row: dict[str, Any] = {
        "point": point.name, "bytes": point.num_bytes, "flops": point.flops,
        "errors": errors, "right": all(error <= TOLERANCE for error in errors.values()),
        "floor_us": 1e6 * max(bound), "may_stay_in_cache": copies == MOST_COPIES,
        "twin_syncs": point.twin_syncs,
    }  # fmt: skip
    if not row["right"]:
        return row
    for who in sets[0]:
        calls = [calls[who] for calls in sets]
        calls *= 1 if DEVICE == "cpu" else math.ceil(FEWEST_CALLS / len(calls))
        on_stream = DEVICE == "cpu" or (who == "twin" and point.twin_syncs)
        run = partial(call_all, calls) if on_stream else captured(calls)
        times = [1e6 * value / len(calls) for value in sample_seconds(run)]
        row[f"{who}_us"] = statistics.median(times)
        row[f"{who}_range_us"] = (min(times), max(times))
    ours = row["ours_us"]
    row |= {"floor_percent": 100 * row["floor_us"] / ours, "speedup": row["twin_us"] / ours}
    if "flash_attn_us" in row:
        row["flash_attn_percent"] = 100 * row["flash_attn_us"] / ours
    if point.flops:
        row["tflops_per_second"] = point.flops / ours / 1e6
    return row


COLUMNS = (
    ("ours us", "ours_us", ".2f"), ("twin us", "twin_us", ".2f"),
    ("flash us", "flash_attn_us", ".2f"), ("floor us", "floor_us", ".2f"),
    ("% floor", "floor_percent", ".1f"), ("speedup", "speedup", ".2f"),
    ("% flash", "flash_attn_percent", ".1f"), ("TFLOP/s", "tflops_per_second", ".1f"),
)  # fmt: skip


def format_row(row: dict[str, Any]) -> str:
    """A line of the table; columns that do not apply are empty."""
    if not row["right"]:
        return f"{row['point']:34} WRONG, and not timed: {row['errors']}"
    marks = {"twin_us": "~" * row["twin_syncs"], "floor_us": "*" * row["may_stay_in_cache"]}
    cells = [
        f"{format(row[key], form) + marks.get(key, ''):>11}" if key in row else f"{'-':>11}"
        for _, key, form in COLUMNS
    ]
    return f"{row['point']:34}{''.join(cells)}{row['errors']['ours']:>10.4f}"


def describe(machine: Machine, cache_bytes: int) -> dict[str, Any]:
    """The machine, its libraries and its speed."""
    return {
        "benchmark": "kernels",
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "Triton's interpreter",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "flash_attn": flash_attn.__version__ if flash_attn else None,
        "memory_bytes_per_second": machine.bytes_per_second,
        "matmul_flops_per_second": machine.flops_per_second,
        "l2_cache_bytes": cache_bytes,
    }


def parse_args(
    argv: list[str] | None, title: str | None = __doc__, known: Collection[str] = KERNELS
) -> argparse.Namespace:
    """Read the command line, and refuse to run where there is nothing to measure.

    `known` are the kernels of the script that `title` describes in its first line.
    """
    parser = argparse.ArgumentParser(description=(title or "").partition("\n")[0])
    parser.add_argument("--only", type=partial(names_among, known), default=[*known],
                        metavar="NAME,...", help=f"of {', '.join(known)}")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="a few small points: a smoke test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args(argv)
    if args.json and not args.json.parent.is_dir():
        parser.error(f"--json: there is no folder {args.json.parent}")
    problem = None
    if DEVICE == "cuda" and not torch.cuda.is_available():
        problem = "needs a CUDA device; without one, TRITON_INTERPRET=1 and --quick test the script"
    elif DEVICE == "cpu" and not args.quick:
        problem = "under TRITON_INTERPRET=1 times mean nothing, and only --quick ends soon"
    if problem:
        parser.exit(2, f"{parser.prog}: error: {problem}\n")
    return args


def names_among(known: Collection[str], text: str) -> list[str]:
    """Parse names with commas between them."""
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"no kernel {name!r}; there are {', '.join(known)}")
    return names


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    """Print a table for each kernel; the exit status says whether all of them were right."""
    args = parse_args(argv)
    torch.manual_seed(0)
    cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size if DEVICE == "cuda" else 0
    machine = measure_machine()
    result = describe(machine, cache_bytes)
    print(
        f"{result['device']}; torch {result['torch']}, triton {result['triton']},"
        f" flash-attn {result['flash_attn'] or 'not there'}\n"
        f"  measured: copy {machine.bytes_per_second / 1e9:,.1f} GB/s,"
        f" matmul {machine.flops_per_second / 1e12:,.2f} TFLOP/s; L2 {cache_bytes >> 20} MiB"
    )
    if DEVICE == "cpu":
        print("  INTERPRETED: the times mean nothing")
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in args.only}
    for name in args.only:
        print(f"\n{name:34}{''.join(f'{title:>11}' for title, *_ in COLUMNS)}{'error':>10}")
        make_point, sizes, quick_sizes = KERNELS[name]
        for size in quick_sizes if args.quick else sizes:
            rows[name].append(measure(make_point(*size), machine, cache_bytes))
            torch.cuda.empty_cache()
            print(format_row(rows[name][-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(result | {"kernels": rows}) + "\n", encoding="utf-8")
    return 0 if all(row["right"] for points in rows.values() for row in points) else 1


if __name__ == "__main__":
    raise SystemExit(main())
