"""Attention to latent rows in Triton, as a share of the memory's rate.

    python benchmarks/latents.py [--only latent_decode,latent_prefill] [--json latents.json]
    TRITON_INTERPRET=1 python benchmarks/latents.py --quick    # no GPU: does it all still run?

Rows have 512 + 64 numbers, as DeepSeek's. The floor of a decode step is the time of the bytes that
it must move at the rate of a large copy (the rows of the cache once for all heads, queries and
outputs), or of its FLOPs at the rate of a large linear layer: from about 100 heads on, the latter.
Times are the device's: launches come from a CUDA graph, with the plan made before. Small points are
first compared with plain PyTorch.
"""

import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from kernels import captured, max_error, measure_machine, parse_args, sample_seconds

from nanovllm.bench.roofline import Machine
from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.kernels.plain import decode_attention as plain_decode
from nanovllm.kernels.plain import prefill_attention as plain_prefill
from nanovllm.kernels.triton.attention.latent_decode import latent_decode, plan_latents
from nanovllm.kernels.triton.attention.latent_prefill import latent_prefill
from nanovllm.kernels.triton.attention.prefill_plan import plan_prefill
from nanovllm.kernels.triton.common import INTERPRETED

DEVICE = "cpu" if INTERPRETED.value else "cuda"
DTYPE, ITEMSIZE, BLOCK_SIZE = torch.bfloat16, 2, 64
RANK, WIDTH, SCALE = 512, 576, 192**-0.5
TOLERANCE = 2.0**-5  # of a row's largest entry
COMPARED = 1 << 16  # tokens of all contexts, at most
CACHES_BYTES, MOST_CACHES = 1 << 30, 16  # of the caches that take turns
KERNELS = ("latent_decode", "latent_prefill")
HEADS = (16, 32, 128)
DECODES = [(rows, context, 1) for rows in (1, 32, 256) for context in (1024, 4096, 32768)]
DECODES += [(32, 4096, 3)]
PREFILLS = [(1, 4096, 4096), (8, 2048, 2048), (2, 1024, 8192), (16, 128, 2048)]

Point = tuple[int, int, int]


def normal(*shape: int) -> torch.Tensor:
    """Random numbers on the device."""
    return torch.randn(shape, dtype=DTYPE, device=DEVICE)


def paged(rows: int, context: int) -> tuple[KVLayer, torch.Tensor]:
    """A cache with contexts of one length, their blocks in random order, and its tables."""
    blocks = -(-context // BLOCK_SIZE)
    tables = torch.randperm(rows * blocks).int().view(rows, blocks).to(DEVICE)
    cache = normal(rows * blocks, BLOCK_SIZE, 1, WIDTH)
    return KVLayer(cache, cache, SCALE, value_width=RANK), tables


def decode_calls(
    heads: int, point: Point, kv: KVLayer, tables: torch.Tensor
) -> list[Callable[[], Any]]:
    """Ours and plain PyTorch's, for `queries` rows of each context."""
    rows, context, queries = point
    q = normal(rows * queries, heads, WIDTH)
    lens = torch.arange(context - queries + 1, context + 1, dtype=torch.int32).repeat(rows)
    lens = lens.to(DEVICE)
    plan = plan_latents(lens, tables, (heads, WIDTH, RANK), DTYPE, queries)

    def twin() -> torch.Tensor:
        groups = plain_decode.plan_decode(lens, tables, BLOCK_SIZE, queries)
        return plain_decode.decode_attention(q, kv, groups)

    return [partial(latent_decode, q, kv, plan), twin]


def prefill_calls(
    heads: int, point: Point, kv: KVLayer, tables: torch.Tensor
) -> list[Callable[[], Any]]:
    """Ours and plain PyTorch's, for the last `queries` tokens of each context."""
    rows, queries, context = point
    q, own = normal(rows * queries, heads, WIDTH), normal(rows * queries, 1, WIDTH)
    cu_q, cu_k = (
        torch.arange(0, (rows + 1) * n, n, dtype=torch.int32, device=DEVICE)
        for n in (queries, context)
    )
    seen = tables if context > queries else None
    plan = plan_prefill(cu_q, cu_k, seen, len(q))

    def twin() -> torch.Tensor:
        groups = plain_prefill.plan_prefill(cu_q, cu_k, seen, BLOCK_SIZE)
        return plain_prefill.prefill_attention(q, own, own, kv, groups)

    return [partial(latent_prefill, q, own, own, kv, plan), twin]


def microseconds(calls: list[Callable[[], Any]]) -> float:
    """The median time of a call."""
    if DEVICE != "cpu":
        for call in calls:  # compiles
            call()
    run = (lambda: [call() for call in calls]) if DEVICE == "cpu" else captured(calls)
    return 1e6 * statistics.median(sample_seconds(run)) / len(calls)


def measure(name: str, heads: int, point: Point, machine: Machine) -> dict[str, Any]:
    """Compare one point with plain PyTorch if it is small, and time it."""
    is_decode = name == "latent_decode"
    rows, queries, context = (point[0], point[2], point[1]) if is_decode else point
    make = decode_calls if is_decode else prefill_calls
    cache_bytes = rows * context * WIDTH * ITEMSIZE
    turns = 1 if DEVICE == "cpu" else max(1, min(MOST_CACHES, CACHES_BYTES // cache_bytes))
    made = [make(heads, point, *paged(rows, context)) for _ in range(turns)]
    row: dict[str, Any] = {"operation": name, "heads": heads, "point": point}
    small = rows * context <= COMPARED and rows * queries * context * heads <= 1 << 28
    if small:
        ours, twin = (call().flatten(0, 1) for call in made[0])
        row["error"] = max_error(ours, twin)
    pairs = rows * (queries * (context - queries) + queries * (queries + 1) // 2)
    row["bytes"] = cache_bytes + rows * queries * heads * (WIDTH + RANK) * ITEMSIZE
    row["flops"] = 2 * (WIDTH + RANK) * heads * pairs
    row["us"] = microseconds([calls[0] for calls in made])
    seconds = row["us"] / 1e6
    row["memory_percent"] = 100 * row["bytes"] / machine.bytes_per_second / seconds
    row["matmul_percent"] = 100 * row["flops"] / machine.flops_per_second / seconds
    return row


def format_row(row: dict[str, Any]) -> str:
    """A line of the table."""
    many, first, second = row["point"]
    sizes = f"{many} x {first}, {second} queries"
    if row["operation"] == "latent_prefill":
        sizes = f"{many} x {first} of {second}"
    name = f"{row['operation']}, {row['heads']} heads, {sizes}"
    cells = f"{row['us']:12.2f}{row['memory_percent']:12.1f}{row['matmul_percent']:12.1f}"
    cells += f"{row['error']:10.4f}" if "error" in row else f"{'-':>10}"
    return f"{name:52}{cells}{'' if row.get('error', 0.0) <= TOLERANCE else '  WRONG'}"


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    """Print a table; the exit status says whether all points that were compared were right."""
    args = parse_args(argv, __doc__, KERNELS)
    torch.manual_seed(0)
    machine = measure_machine()
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "Triton's interpreter"
    print(
        f"{name}: a copy moves {machine.bytes_per_second / 1e9:,.1f} GB/s, a linear layer computes"
        f" {machine.flops_per_second / 1e12:,.1f} TFLOP/s"
    )
    print(f"{'':52}{'us':>12}{'% memory':>12}{'% matmul':>12}{'error':>10}")
    points = {"latent_decode": DECODES, "latent_prefill": PREFILLS}
    if args.quick:
        points = {"latent_decode": [(2, 70, 1)], "latent_prefill": [(1, 9, 70), (1, 20, 20)]}
    rows = []
    for operation in args.only:
        for heads in HEADS[:1] if args.quick else HEADS:
            for point in points[operation]:
                rows.append(measure(operation, heads, point, machine))
                print(format_row(rows[-1]), flush=True)
                if DEVICE == "cuda":
                    torch.cuda.empty_cache()
    if args.json:
        figures = {"benchmark": "latents", "device": name, "points": rows}
        args.json.write_text(json.dumps(figures) + "\n", encoding="utf-8")
    return 0 if all(row.get("error", 0.0) <= TOLERANCE for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
