"""Linear layers with weights in GGUF's blocks on a GPU, next to PyTorch's with a bf16 weight.

    python benchmarks/block_linear.py --json block_linear.jsonl
    python benchmarks/block_linear.py --tiles --types Q4_K --rows 1,16 --shapes 4096x4096
    TRITON_INTERPRET=1 python benchmarks/block_linear.py --quick    # no GPU: does it all still run?

Prints a line for each shape, number of rows, type and way to compute the product, and with --json
writes it as a line of JSON. `ours` is what an engine calls, `kernel` multiplies the codes,
`dequantize` converts the weight before PyTorch multiplies it. With --tiles, `kernel` is measured
with many ways to divide the product, and the fastest ones are printed. Before its first
measurement, a type is compared with its plain twin. Weights are random.

Times come from CUDA graphs in which copies of the weight take turns, so that weights are read from
memory. The percentage is of the rate of a large copy, for the bytes that `ours` must read.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.kernels.operands.block_matrix import BlockMatrix
from nanovllm.kernels.operands.block_types import BLOCK_TYPES
from nanovllm.kernels.plain import block_linear as plain
from nanovllm.kernels.triton.common import INTERPRETED, num_multiprocessors
from nanovllm.kernels.triton.dry_run import dry_run
from nanovllm.kernels.triton.linear import block_products
from nanovllm.kernels.triton.linear.block_dequantize import dequantize_blocks
from nanovllm.kernels.triton.linear.block_linear import block_linear, block_rows
from nanovllm.kernels.triton.linear.block_planes import BlockPlanes, arrange_blocks
from nanovllm.kernels.triton.linear.row_outputs import RowOperands
from nanovllm.kernels.triton.linear.row_tiles import RowTiles

DEVICE = "cpu" if INTERPRETED.value else "cuda"
TYPES = "Q4_0,Q8_0,Q4_K,Q5_K,Q6_K"
SHAPES = "6144x4096,4096x4096,24576x4096,4096x12288,151936x4096"  # Qwen3-8B's
ROWS = "1,4,16,64,256,1024"
READ_BYTES = 256 << 20  # of the copies that take turns: several times the L2 cache
MOST_COPIES = 32
# Of the largest output; the interpreter truncates numbers to bfloat16.
TOLERANCE = 2.0 ** (-6 if INTERPRETED.value else -7)
BF16 = torch.bfloat16
FASTEST = 3  # ways to divide a product that are printed

LARGE_TILES = RowTiles(256, 128, 1, 2, 8)

Call = Callable[[torch.Tensor], Any]


def random_blocks(name: str, size_out: int, size_in: int) -> BlockMatrix:
    """Random bytes, whose float16 numbers are finite."""
    kind = BLOCK_TYPES[name]
    shape = (size_out, size_in // kind.size, kind.num_bytes)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
    # A float16 number ends with its exponent: such bytes are about 2^-7.
    for at in {"Q2_K": (81, 83), "Q3_K": (109,), "Q6_K": (209,), "Q4_1": (1, 3), "Q5_1": (1, 3),
               "Q4_K": (1, 3), "Q5_K": (1, 3), "MXFP4": ()}.get(name, (1,)):  # fmt: skip
        codes[..., at] = codes[..., at] & 0x83 | 0x20
    if name == "MXFP4":
        codes[..., 0] = 120
    return BlockMatrix(codes, kind)


def check(name: str, size_out: int, size_in: int) -> dict[str, Any]:
    """Compare values, rows and products with the plain twin."""
    weight = random_blocks(name, size_out, size_in)
    arranged = arrange_blocks(weight)
    exact = plain.dequantize(weight.codes, weight.kind).flatten(1)
    ids = torch.randint(0, size_out, (5,), device=DEVICE)
    line: dict[str, Any] = {
        "check": name, "shape": [size_out, size_in],
        "bytes_to_stored": round(arranged.num_bytes / weight.codes.nbytes, 4),
        "float32_equal": torch.equal(dequantize_blocks(arranged, torch.float32), exact),
        "bf16_equal": torch.equal(dequantize_blocks(arranged, BF16), exact.bfloat16()),
        "rows_equal": torch.equal(block_rows(arranged, ids, torch.float32), exact[ids]),
    }  # fmt: skip
    errors: dict[int | str, float] = {}
    alone = torch.randn(1, size_in, dtype=BF16, device=DEVICE)
    same = True
    for num_rows in (1, 3, 17, 40, 130):
        x = torch.randn(num_rows, size_in, dtype=BF16, device=DEVICE)
        x[0] = alone[0]
        out = block_linear(x, arranged, None)
        twin = x.double() @ exact.bfloat16().double().T
        errors[num_rows] = relative(out, twin)
        if num_rows > block_products.SAME_ROWS and DEVICE == "cuda":
            errors["large tiles"] = relative(product(x, arranged, LARGE_TILES), twin)
        if num_rows == 3:  # fewer have integer products
            first = out[0]
        elif 3 < num_rows <= block_products.SAME_ROWS:
            same &= torch.equal(first, out[0])
    line |= {"errors": errors, "three_rows_equal_many": same}
    line["right"] = line["rows_equal"] and line["float32_equal"] and same
    line["right"] &= max(errors.values()) <= TOLERANCE
    return line


def relative(out: torch.Tensor, twin: torch.Tensor) -> float:
    """The largest difference over the largest output."""
    return float((out - twin).abs().amax() / twin.abs().amax())


def microseconds(calls: list[Call], x: torch.Tensor) -> float:
    """The median time of a call, by a CUDA graph of all calls."""
    if DEVICE == "cpu":
        start = time.perf_counter()
        calls[0](x)
        return 1e6 * (time.perf_counter() - start)
    calls[0](x)
    torch.cuda.synchronize()
    calls = calls * math.ceil(8 / len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call(x)
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / len(calls))
    return sorted(times[2:])[5]


def copies(weight: Any, num_bytes: int, copy: Callable[[Any], Any]) -> list[Any]:
    """The weight and copies of it that are together larger than caches."""
    count = 1 if DEVICE == "cpu" else min(MOST_COPIES, math.ceil(READ_BYTES / num_bytes))
    return [weight, *(copy(weight) for _ in range(count - 1))]


def copy_planes(weight: BlockPlanes) -> BlockPlanes:
    """A copy whose codes are at another place."""
    high = None if weight.high is None else weight.high.clone()
    return replace(weight, low=weight.low.clone(), high=high, scales=weight.scales.clone())


def product(x: torch.Tensor, weight: BlockPlanes, tiles: RowTiles | None = None) -> torch.Tensor:
    """The product by the kernel that reads codes."""
    out = x.new_empty(len(x), weight.shape[0])
    block_products.launch(RowOperands(x, None, out), weight, tiles)
    return out


def some_tiles(num_rows: int, weight: BlockPlanes) -> list[RowTiles]:
    """Ways to divide a product. Some may not fit the GPU."""
    least = max(16, 1 << (num_rows - 1).bit_length())
    if num_rows > 64:
        shapes = itertools.product({min(128, least), min(256, least)},
                                   ((64, 4), (128, 8), (256, 16)), (1, 2, 3))  # fmt: skip
    else:
        shapes = itertools.product({8, least} if num_rows <= 8 else {least},
                                   ((32, 2), (64, 4), (128, 8)), (1, 2, 4))  # fmt: skip
    processors, found = num_multiprocessors(weight.device), []
    for (rows, (outputs, warps), stages), splits in itertools.product(shapes, (1, 2, 4, 8, 16)):
        programs = -(-num_rows // rows) * -(-weight.shape[0] // outputs) * splits
        most = 3 * processors if num_rows > 64 else 12 * processors
        if splits > 1 and (programs > most or weight.runs < 2 * splits):
            continue
        if splits < 8 and 3 * programs < processors:
            continue
        found.append(RowTiles(rows, outputs, splits, stages, warps))
    return found


def compile_all(calls: list[Call], x: torch.Tensor) -> None:
    """Compile the kernels of calls, many at the same time; errors come again with the calls."""

    def call_each() -> None:
        for call in calls:
            with contextlib.suppress(Exception):
                call(x)

    if DEVICE == "cuda":
        dry_run(call_each, os.cpu_count() or 1)


def fastest_tiles(weights: list[BlockPlanes], x: torch.Tensor) -> list[tuple[float, RowTiles]]:
    """Times and tiles; those that do not compile are left out."""
    found = []
    tried = some_tiles(len(x), weights[0])
    compile_all([lambda x, t=t: product(x, weights[0], t) for t in tried], x)
    for tiles in tried:
        calls: list[Call] = [lambda x, w=w, t=tiles: product(x, w, t) for w in weights]
        try:
            found.append((microseconds(calls, x), tiles))
        except Exception as error:  # too much shared memory, or a size that has no instruction
            if "illegal" in str(error):
                raise
    return sorted(found, key=lambda pair: pair[0])


def ways(weights: list[BlockPlanes], num_rows: int) -> dict[str, list[Call]]:
    """The ways to compute a product that make sense for a number of rows."""
    calls: dict[str, list[Call]] = {"ours": [lambda x, w=w: block_linear(x, w) for w in weights]}
    if num_rows >= 64:
        calls["kernel"] = [lambda x, w=w: product(x, w) for w in weights]
        calls["dequantize"] = [
            lambda x, w=w: F.linear(x, dequantize_blocks(w, x.dtype)) for w in weights
        ]
    return calls


def measure_copy() -> float:
    """The bytes that a large copy reads and writes in a microsecond."""
    size = 1 << (20 if DEVICE == "cpu" else 30)
    source = torch.ones(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * size / microseconds([lambda _: target.copy_(source)], source)


def points(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Check the types, then measure them."""
    rate = measure_copy()
    yield {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "Triton's interpreter",
        "torch": torch.__version__, "copy_gb_per_second": round(rate / 1e3, 1),
    }  # fmt: skip
    for name in BLOCK_TYPES:
        yield check(name, 200, 1024 if BLOCK_TYPES[name].size == 256 else 1056)
    for size_out, size_in in args.shapes:
        inputs = [torch.randn(n, size_in, dtype=BF16, device=DEVICE) for n in args.rows]
        plain_weight = torch.randn(size_out, size_in, dtype=BF16, device=DEVICE)
        plains = copies(plain_weight, 2 * plain_weight.numel(), torch.Tensor.clone)
        bf16_us = {
            len(x): microseconds([lambda x, w=w: F.linear(x, w) for w in plains], x) for x in inputs
        }
        del plains, plain_weight
        for num_rows, us in bf16_us.items():
            yield point(size_out, size_in, num_rows, "bf16", "torch", us, us, 16.0, rate)
        for name in args.types:
            one = arrange_blocks(random_blocks(name, size_out, size_in))
            weights = copies(one, one.num_bytes, copy_planes)
            bits = 8 * one.num_bytes / (size_out * size_in)
            for x in inputs:
                compile_all([calls[0] for calls in ways([one], len(x)).values()], x)
                base = bf16_us[len(x)]
                for way, calls in ways(weights, len(x)).items():
                    us = microseconds(calls, x)
                    yield point(size_out, size_in, len(x), name, way, us, base, bits, rate)
                if args.tiles and len(x) <= 256:
                    for us, tiles in fastest_tiles(weights, x)[:FASTEST]:
                        yield point(
                            size_out, size_in, len(x), name, "tiles", us, base, bits, rate
                        ) | {"tiles": str(tiles)}
            del one, weights
            if DEVICE == "cuda":
                torch.cuda.empty_cache()


def point(
    size_out: int, size_in: int, num_rows: int, name: str, way: str, us: float, base: float,
    bits: float, rate: float,
) -> dict[str, Any]:  # fmt: skip
    """A line of the results."""
    num_bytes = size_out * size_in * bits / 8 + 2 * num_rows * (size_in + size_out)
    return {
        "shape": f"{size_out}x{size_in}", "rows": num_rows, "type": name, "way": way,
        "us": round(us, 2), "times_as_fast_as_bf16": round(base / us, 3),
        "percent_of_copy": round(100 * num_bytes / rate / us, 1),
    }  # fmt: skip


def sizes(text: str) -> list[tuple[int, int]]:
    """Parse shapes, NxK, with commas between them."""
    return [(int(out), int(in_)) for out, _, in_ in (s.partition("x") for s in text.split(","))]


@torch.inference_mode()
def main() -> int:
    """Print the lines; the exit status says whether all checks were right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--types", type=lambda text: text.split(","), default=TYPES.split(","))
    parser.add_argument("--shapes", type=sizes, default=sizes(SHAPES), metavar="NxK,...")
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")],
                        default=[int(n) for n in ROWS.split(",")], metavar="N,...")  # fmt: skip
    parser.add_argument("--tiles", action="store_true", help="search for the fastest tiles")
    parser.add_argument("--quick", action="store_true", help="a small shape: a smoke test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append lines here")
    args = parser.parse_args()
    if args.quick:
        args.shapes, args.rows = [(128, 512)], [1, 70]
    torch.manual_seed(0)
    right = True
    for line in points(args):
        right &= line.get("right", True)
        text = json.dumps(line)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        if args.json:
            with args.json.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
