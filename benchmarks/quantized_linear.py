"""The CPU's linear layers with quantized weights, against bf16 in oneDNN's layout and a plain read.

    python benchmarks/quantized_linear.py [--shapes 4096x1024,...] [--rows 1,16,512] [--threads 4]

Inputs are bf16. Formats take turns, so that other load on the machine affects all of them alike;
each turn goes through copies of a layer that together are too large for a cache. `read` adds up the
bytes of the int8 codes as integers: the floor for one row. Reported are medians, and medians of the
ratios of a round.
"""

import json
import statistics
from dataclasses import replace
from typing import Any

import torch
from linear_turns import Call, linear_parser, measure
from torch.nn.functional import linear

from nanovllm.kernels.cpu.tiled_linear import arrange, tiled_linear
from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix
from nanovllm.kernels.plain.packed_linear import can_pack, pack, packed_linear

FORMATS: dict[str, tuple[int, int | None, bool]] = {  # bits, inputs of a group, zero points
    "int8": (8, None, False),
    "e4m3": (8, None, False),
    "int4 g128": (4, 128, False),
    "int4 g128 zeros": (4, 128, True),
    "int4 g32": (4, 32, False),
}
BASE, READ = "bf16", "read"
MANY_ROWS = 64  # with more, a layer is computed a few times a turn: weights are a small part


def quantized(name: str, size_out: int, size_in: int) -> QuantizedMatrix:
    """A random weight in one of the formats."""
    bits, group, has_zeros = FORMATS[name]
    group = min(group or size_in, size_in)
    limit = 1 << (bits - 1)
    codes = torch.randint(-limit, limit, (size_out, size_in), dtype=torch.int8)
    if name == "e4m3":
        codes = codes.to(torch.float8_e4m3fn)
    scales = torch.rand(size_out, -(-size_in // group)) / limit
    zeros = torch.randint(-limit, limit, scales.shape, dtype=torch.int8) if has_zeros else None
    return QuantizedMatrix(codes, scales, zeros, (1, group), bits)


def make_calls(size_out: int, size_in: int, num_bytes: int) -> dict[str, list[Call]]:
    """For each format, calls with copies of a weight that together take `num_bytes`."""

    def copies(size: int) -> range:
        return range(max(1, num_bytes // size))

    weight = torch.randn(size_out, size_in, dtype=torch.bfloat16)
    plain = [weight.clone() for _ in copies(2 * weight.numel())]
    calls: dict[str, list[Call]] = {BASE: [lambda x, w=w: linear(x, w) for w in plain]}
    if can_pack(weight):
        packs = [pack(weight) for weight in plain]
        calls[BASE] = [lambda x, w=w: packed_linear(x, w) for w in packs]
    for name in FORMATS:
        one = arrange(quantized(name, size_out, size_in))
        all_ = [replace(one, codes=one.codes.clone()) for _ in copies(one.codes.nbytes)]
        calls[name] = [lambda x, w=w: tiled_linear(x, w) for w in all_]
        if name == "int8":
            longs = [w.codes.view(-1).view(torch.int64) for w in all_]
            calls[READ] = [lambda _, w=w: w.sum() for w in longs]
    return calls


def report(shape: str, num_rows: int, times: dict[str, list[float]]) -> dict[str, Any]:
    """Print a line for each format, and return what is in it."""
    figures: dict[str, Any] = {}
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(times[BASE], own, strict=True))
        median = round(statistics.median(own), 1)
        figures[name] = {"us": median, "times_as_fast_as_bf16": round(ratio, 3)}
        print(f"{shape:>12} {num_rows:5} {name:16} {median:11.1f} {ratio:7.2f}x", flush=True)
    return {"shape": shape, "rows": num_rows, "formats": figures}


@torch.inference_mode()
def main() -> None:
    """Print a line for each shape, number of rows and format, and one of JSON."""
    parser = linear_parser(__doc__, "1,16,512", 15, "format")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"{'outputs x in':>12} {'rows':>5} {'format':16} {'us':>11} {'to bf16':>8}")
    results = []
    for size_out, size_in in args.shapes:
        calls = make_calls(size_out, size_in, args.megabytes << 20)
        for num_rows in args.rows:
            x = torch.randn(num_rows, size_in, dtype=torch.bfloat16)
            times = measure(calls, x, args.rounds, None if num_rows < MANY_ROWS else 3)
            results.append(report(f"{size_out}x{size_in}", num_rows, times))
    print(json.dumps({"benchmark": "quantized_linear", "threads": args.threads, "points": results}))


if __name__ == "__main__":
    main()
