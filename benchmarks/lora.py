"""What adapters add to a decode step: the two kernels of each linear layer of an 8B model.

    python benchmarks/lora.py [--rows 1,32,256] [--slots 1,8] [--rank 16]
    TRITON_INTERPRET=1 python benchmarks/lora.py --quick    # no GPU: does it all still run?

Rows are spread evenly over the adapters of some slots, out of 8 with room for rank 64. The floor is
the time of the bytes of A and B in these slots, and of the rows, at the rate of a large copy. Times
are the device's: launches come from a CUDA graph, which goes through copies of the weights that are
too large for its cache. `added` is the time of a layer with adapters less that of one without. The
sums are of the model's 36 layers. Steps of few rows have kernels of their own (`few_rows`), of
which one computes a layer and its adapters (`one`); `three` is the time without that one.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.kernels.operands.low_rank import LowRank
from nanovllm.kernels.operands.scaled import Scaled
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.kernels.triton.table import triton_kernels
from nanovllm.layers.lora import AdapterRows, group_rows

NUM_SLOTS, MAX_RANK, NUM_LAYERS = 8, 64, 36
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16
TOLERANCE = 2e-2  # of the largest number
SAMPLES, REPEATS = 7, 5
CACHE = 200 << 20  # bytes: more than the caches of any GPU


@dataclass(frozen=True)
class Shape:
    """A linear layer."""

    name: str
    size_in: int
    sizes: tuple[int, ...]

    @property
    def size_out(self) -> int:
        """The outputs of all projections."""
        return sum(self.sizes)


SHAPES = (
    Shape("qkv_proj", 4096, (4096, 1024, 1024)),
    Shape("o_proj", 4096, (4096,)),
    Shape("gate_up_proj", 4096, (12288, 12288)),
    Shape("down_proj", 12288, (4096,)),
)
SMALL = (Shape("qkv_proj", 64, (64, 32, 32)), Shape("down_proj", 96, (64,)))


@dataclass(frozen=True)
class Layer:
    """A layer's weight and its adapters."""

    weight: torch.Tensor
    low_rank: LowRank


def make_layer(shape: Shape, rank: int) -> Layer:
    """Random weights; what is beyond the rank is not a number."""
    parts = len(shape.sizes)

    def room(*size: int) -> torch.Tensor:
        return torch.full(size, torch.nan, dtype=DTYPE, device=DEVICE)

    a, b = (
        room(NUM_SLOTS, parts, MAX_RANK, shape.size_in),
        room(NUM_SLOTS, MAX_RANK, shape.size_out),
    )
    a[:, :, :rank].normal_(0.0, shape.size_in**-0.5)
    b[:, :rank].normal_(0.0, rank**-0.5)
    ranks = torch.full((NUM_SLOTS, parts), rank, dtype=torch.int32, device=DEVICE)
    weight = torch.randn(shape.size_out, shape.size_in, device=DEVICE, dtype=DTYPE)
    weight *= shape.size_in**-0.5
    return Layer(weight, LowRank(a.flatten(1, 2), b, ranks, shape.sizes))


def with_adapters(layer: Layer, x: torch.Tensor, rows: AdapterRows) -> torch.Tensor:
    """A layer's output, as the model computes it."""
    return rows.add(x, layer.low_rank, lambda: F.linear(x, layer.weight))


def few_rows_calls(
    layers: list[Layer], x: torch.Tensor, groups: Any
) -> dict[str, list[Callable[[], Any]]]:
    """The kernels of steps of few rows: without adapters, and with them, as one and as three."""
    from nanovllm.kernels.triton.linear.few_rows import FewRows, few_rows_for
    from nanovllm.kernels.triton.lora import adapted_linear
    from nanovllm.kernels.triton.lora.adapted_few_rows import AdaptedFewRows, with_counters

    few = few_rows_for([layer.weight for layer in layers])
    if few is None or len(x) > few.most_rows:
        return {}
    adapters = [with_counters({id(layer.weight): layer.low_rank}) for layer in layers]
    adapted = [
        AdaptedFewRows(few.most_rows, few.arrivals, groups=groups, adapters=each)
        for each in adapters
    ]
    projections = len(layers[0].low_rank.sizes)
    scaled = Scaled(x, torch.ones(len(x), 64, device=DEVICE), 1e-6)

    def layer_of(kernels: FewRows, layer: Layer, splits: bool = False) -> torch.Tensor:
        divide = adapted_linear.divide
        try:
            if splits:
                adapted_linear.divide = lambda *_: None  # type: ignore[assignment]
            if projections == 1:
                return kernels.product(x, layer.weight)
            linear = kernels.gated if projections == 2 else kernels.linear
            return linear(scaled, layer.weight)
        finally:
            adapted_linear.divide = divide

    counters = [each.arrivals for of_layer in adapters for each in of_layer.values()]

    def first() -> torch.Tensor:
        torch._foreach_zero_(counters)
        return layer_of(adapted[0], layers[0])

    one, three = (layer_of(adapted[0], layers[0], splits).float() for splits in (False, True))
    assert (one - three).abs().amax() <= TOLERANCE * three.abs().amax(), "one kernel differs"
    pairs = [*zip(adapted, layers, strict=True)]
    return {
        "few": [partial(layer_of, few, layer) for layer in layers],
        "one": [first, *(partial(layer_of, *each) for each in pairs[1:])],
        "three": [partial(layer_of, *each, True) for each in pairs],
    }


def microseconds(calls: list[Callable[[], Any]]) -> float:
    """The median time of one of the calls, on the device."""
    if DEVICE == "cpu":
        for call in calls:
            call()
        return 0.0
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(SAMPLES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(REPEATS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / REPEATS / len(calls))
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes per second of a large copy."""
    if DEVICE == "cpu":
        return 1e11
    source = torch.ones(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (microseconds([lambda: target.copy_(source)] * 4) * 1e-6)


def measure(
    kernels: Kernels, shape: Shape, layers: list[Layer], num_rows: int, slots: int, rank: int,
    bytes_per_second: float,
) -> dict[str, Any]:  # fmt: skip
    """Verify one point, then time it."""
    x = torch.randn(num_rows, shape.size_in, device=DEVICE, dtype=DTYPE)
    ids = (torch.arange(num_rows, device=DEVICE) % slots).int()
    rows = group_rows(ids, NUM_SLOTS, kernels)
    groups = rows.groups
    ours = with_adapters(layers[0], x, rows).float()
    twin = with_adapters(layers[0], x, group_rows(ids, NUM_SLOTS, PLAIN)).float()
    error = float((ours - twin).abs().amax() / twin.abs().amax())
    downs = [kernels.lora_down(x, layer.low_rank, groups) for layer in layers]
    out = torch.zeros(num_rows, shape.size_out, device=DEVICE, dtype=DTYPE)
    calls: dict[str, list[Callable[[], Any]]] = {
        "linear": [partial(F.linear, x, layer.weight) for layer in layers],
        "with": [partial(with_adapters, layer, x, rows) for layer in layers],
        "down": [partial(kernels.lora_down, x, layer.low_rank, groups) for layer in layers],
        "up": [
            partial(kernels.lora_up, down, layer.low_rank, groups, out, None)
            for down, layer in zip(downs, layers, strict=True)
        ],
    }
    calls |= few_rows_calls(layers, x, groups)
    used = min(slots, num_rows)
    matrices = used * rank * (len(shape.sizes) * shape.size_in + shape.size_out)
    moved = DTYPE.itemsize * (matrices + num_rows * (shape.size_in + 2 * shape.size_out))
    times = {name: microseconds(each) for name, each in calls.items()}
    return {
        "layer": shape.name, "rows": num_rows, "slots": slots, "error": error,
        "right": error <= TOLERANCE, "floor_us": 1e6 * moved / bytes_per_second,
        "added_us": times["with"] - times["linear"],
        **{f"{name}_us": value for name, value in times.items()},
    }  # fmt: skip


def numbers(text: str) -> list[int]:
    """Parse integers with commas between them."""
    return [int(each) for each in text.split(",")]


@torch.inference_mode()
def main() -> None:
    """Print a line for each layer, number of rows and of slots, and one of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=numbers, default=[1, 32, 256], metavar="N,...")
    parser.add_argument("--slots", type=numbers, default=[1, 8], metavar="N,...")
    parser.add_argument("--rank", type=int, default=16, metavar="N")
    parser.add_argument("--quick", action="store_true", help="small layers, to see that it runs")
    args = parser.parse_args()
    torch.manual_seed(0)
    kernels = triton_kernels()
    rate, results = copy_rate(), []
    columns = ("linear", "with", "added", "down", "up", "floor", "few", "one", "three")
    print(
        f"{'layer':>14} {'rows':>5} {'slots':>5} " + " ".join(f"{c + ' us':>10}" for c in columns)
    )
    for shape in SMALL if args.quick else SHAPES:
        one = make_layer(shape, args.rank)
        touched = 2 * NUM_SLOTS * args.rank * (len(shape.sizes) * shape.size_in + shape.size_out)
        copies = 1 if args.quick else min(NUM_LAYERS, 2 + CACHE // touched)
        weights = [one.weight, *(torch.randn_like(one.weight) for _ in range(min(3, copies - 1)))]
        layers = [
            Layer(weights[i % len(weights)], make_layer(shape, args.rank).low_rank)
            for i in range(copies)
        ]
        for num_rows in args.rows:
            for slots in args.slots:
                result = measure(kernels, shape, layers, num_rows, slots, args.rank, rate)
                results.append(result)
                values = " ".join(f"{result.get(f'{c}_us', 0):10.2f}" for c in columns)
                wrong = "" if result["right"] else f"  WRONG: error {result['error']:.3f}"
                print(f"{shape.name:>14} {num_rows:5} {slots:5} {values}{wrong}", flush=True)
        del one, layers, weights
    for num_rows in args.rows:
        for slots in args.slots:
            same = [r for r in results if (r["rows"], r["slots"]) == (num_rows, slots)]
            added, linear = (
                NUM_LAYERS * sum(r[key] for r in same) / 1e3 for key in ("added_us", "linear_us")
            )
            few = [
                f"{key} {NUM_LAYERS * sum(r[f'{key}_us'] for r in same) / 1e3:.2f} ms"
                for key in ("few", "one", "three")
                if all(f"{key}_us" in r for r in same)
            ]
            print(
                f"{num_rows} rows, {slots} slots: {NUM_LAYERS} layers {linear:.2f} ms, adapters"
                f" add {added:.2f} ms; " + ", ".join(few)
            )
    print(json.dumps({"benchmark": "lora", "rank": args.rank, "points": results}))
    if not all(result["right"] for result in results):
        raise SystemExit("a result is wrong")


if __name__ == "__main__":
    main()
