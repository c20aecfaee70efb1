"""The CPU's linear layers with plain weights: our products, oneDNN's, and a plain read.

    python benchmarks/plain_linear.py [--shapes 4096x1024,...] [--rows 1,16,512] [--threads 2]
        [--dtype bfloat16]

The products take turns. Each turn goes through copies of a layer that together are too large for a
cache. `4 KiB` is our product of a weight in pages of that size. `read` adds up our weight as
integers: the floor for one row. Reported are the medians of the rounds in microseconds, GB of
weights a second, and how many times as fast as oneDNN ours is: the median of the rounds' ratios.
"""

import json
import statistics
from dataclasses import replace
from typing import Any

import torch
from linear_turns import Call, linear_parser, measure

from nanovllm.kernels.cpu import processor
from nanovllm.kernels.cpu.tiled_linear import arrange_plain, tiled_linear
from nanovllm.kernels.plain.packed_linear import pack, packed_linear

MANY_ROWS = 128  # with more, a layer is computed a few times a turn: weights are a small part
PAUSE = 0.02  # seconds, in which the threads of the product before go to sleep


def make_calls(
    size_out: int, size_in: int, dtype: torch.dtype, num_bytes: int
) -> dict[str, list[Call]]:
    """For each product, calls with copies of a weight that together take `num_bytes`."""
    weight = torch.randn(size_out, size_in).to(dtype)
    count = max(1, num_bytes // weight.nbytes)
    ours = [arrange_plain(weight) for _ in range(count)]
    packs = [pack(weight) for _ in range(count)]
    small = [replace(w, codes=w.codes.clone()) for w in ours if w is not None]
    longs = [w.codes.view(-1).view(torch.int64) for w in ours if w is not None]
    return {
        "oneDNN": [lambda x, w=w: packed_linear(x, w) for w in packs],
        "ours": [lambda x, w=w: tiled_linear(x, w) for w in ours],
        "4 KiB": [lambda x, w=w: tiled_linear(x, w) for w in small],
        "read": [lambda _, w=w: w.sum() for w in longs],
    }


def report(
    shape: str, num_rows: int, num_bytes: int, times: dict[str, list[float]]
) -> dict[str, Any]:
    """Print a line, and return what is in it."""
    medians = {name: statistics.median(own) for name, own in times.items()}
    pairs = zip(times["oneDNN"], times["ours"], strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    figures = "  ".join(
        f"{name} {median:9.1f} us {num_bytes / median / 1e3:5.1f} GB/s"
        for name, median in medians.items()
    )
    print(f"{shape:>12} {num_rows:4} rows  {figures}  {ratio:5.2f}x", flush=True)
    return {"shape": shape, "rows": num_rows, "us": medians, "times_as_fast": ratio}


@torch.inference_mode()
def main() -> None:
    """Print a line for each shape and number of rows, and one of JSON."""
    parser = linear_parser(__doc__, "1,2,4,8,16,32,64,512", 5, "product")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    if dtype not in processor.tiled_types():
        parser.error(f"our products of {args.dtype} are not used on this processor")
    results = []
    for size_out, size_in in args.shapes:
        calls = make_calls(size_out, size_in, dtype, args.megabytes << 20)
        for num_rows in args.rows:
            x = torch.randn(num_rows, size_in).to(dtype)
            most = None if num_rows < MANY_ROWS else 4
            times = measure(calls, x, args.rounds, most, PAUSE)
            num_bytes = size_out * size_in * dtype.itemsize
            results.append(report(f"{size_out}x{size_in}", num_rows, num_bytes, times))
    print(json.dumps({"benchmark": "plain_linear", "threads": args.threads, "dtype": args.dtype,
                      "points": results}))  # fmt: skip


if __name__ == "__main__":
    main()
