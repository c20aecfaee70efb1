"""Recurrences and short convolutions in Triton, as a share of the memory's rate.

    python benchmarks/states.py [--only gated_delta,state_space] [--json states.json]
    TRITON_INTERPRET=1 python benchmarks/states.py --quick    # no GPU: does it all still run?

The floor is the time of the bytes that a call must move, at the rate of a large copy: inputs and
outputs once, and in a decode step each state once in each direction. Times are the device's:
launches come from a CUDA graph. Its calls use different states in turn, and the same inputs, which
may stay in a cache if they are few. Small points are first compared with plain PyTorch. `ordered`
is the time of the kernels with one order of sums, which compute prompts token by token. If
flash-linear-attention is installed, `fla` is the time of its kernels for the gated delta rule,
whose heads are normalized, and whose gates are made, before.
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from kernels import captured, max_error, measure_machine, parse_args, sample_seconds

from nanovllm.kernels.operands.rates import DeltaRates, SpaceRates
from nanovllm.kernels.operands.state_step import StateStep
from nanovllm.kernels.plain.gated_delta import split_heads, unit
from nanovllm.kernels.table import PLAIN
from nanovllm.kernels.triton.common import INTERPRETED
from nanovllm.kernels.triton.table import triton_kernels

DEVICE = "cpu" if INTERPRETED.value else "cuda"
DTYPE = torch.bfloat16
TOLERANCE = 2.0**-5  # of a row's largest entry
COMPARED = 512  # tokens, at most
STATE_BYTES = 1 << 30  # of the states that take turns: more than any cache has
PREFILLS, DECODES = (512, 1024, 2048, 4096, 8192, 16384), (1, 4, 16, 32, 64, 128, 256)

try:
    from fla.ops import gated_delta_rule as fla
except ImportError:
    fla = None

Inputs = tuple[Any, ...]


def normal(*shape: int) -> torch.Tensor:
    """Random numbers on the device."""
    return torch.randn(shape, dtype=DTYPE, device=DEVICE)


@dataclass(frozen=True)
class Operation:
    """An operation of a model's layer: its inputs for a number of tokens, and its states."""

    name: str
    model: str
    make: Callable[[int], Inputs]
    state: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def call(self, kernels: Any, inputs: Inputs, states: torch.Tensor, step: StateStep) -> Any:
        """The outputs."""
        if self.name == "causal_conv":
            return kernels.causal_conv(*inputs, states, step, True)
        return getattr(kernels, self.name)(*inputs, states, step)


def conv_inputs(channels: int, width: int, tokens: int) -> Inputs:
    """Of a convolution, but for its states."""
    return normal(tokens, channels), normal(channels, width), None


def delta_inputs(key_heads: int, heads: int, size: int, tokens: int) -> Inputs:
    """Of a gated delta rule, but for its states."""
    rates = DeltaRates(*torch.randn(2, heads, device=DEVICE).unbind())
    qkv = normal(tokens, (2 * key_heads + heads) * size)
    return qkv, normal(tokens, heads), normal(tokens, heads), rates


def space_inputs(groups: int, heads: int, dim: int, size: int, tokens: int) -> Inputs:
    """Of a state space, but for its states."""
    rates = SpaceRates(*torch.randn(3, heads, device=DEVICE).unbind())
    return normal(tokens, heads * dim + 2 * groups * size), normal(tokens, heads), rates


def operations(quick: bool) -> list[Operation]:
    """Those of models' layers, or small ones."""
    if quick:
        return [
            Operation("causal_conv", "small", partial(conv_inputs, 64, 4), (3, 64), DTYPE),
            Operation("gated_delta", "small", partial(delta_inputs, 1, 2, 16), (2, 16, 16)),
            Operation("state_space", "small", partial(space_inputs, 1, 2, 16, 16), (2, 16, 16)),
        ]
    return [
        Operation("causal_conv", "Qwen3-Next", partial(conv_inputs, 8192, 4), (3, 8192), DTYPE),
        Operation("gated_delta", "Qwen3-Next", partial(delta_inputs, 16, 32, 128), (32, 128, 128)),
        Operation("state_space", "Mamba-2", partial(space_inputs, 1, 80, 64, 128), (80, 64, 128)),
    ]


def prefill_step(tokens: int, slot: int) -> StateStep:
    """One sequence that begins."""
    after = torch.full((tokens,), -1)
    after[-1] = slot
    ends = torch.tensor([0, tokens]).numpy()
    before = torch.zeros(1, dtype=torch.long, device=DEVICE)
    return StateStep(before, after.to(DEVICE), ends, kept=after.numpy())


def decode_step(rows: int, first: int) -> StateStep:
    """Sequences that keep the state of a token where the last one was."""
    slots = first + torch.arange(rows, device=DEVICE)
    return StateStep(slots, slots)


def fla_call(inputs: Inputs, states: torch.Tensor, step: StateStep) -> Callable[[], Any]:
    """The same recurrence by flash-linear-attention, with its inputs ready."""
    qkv, a, b, rates = inputs
    _, heads, size, _ = states.shape
    q, k, v = split_heads(qkv, heads, size, size)
    q, k = (unit(x.float()).to(DTYPE).repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    g = -rates.log_rate.exp() * F.softplus(a.float() + rates.bias)
    rows = [x.contiguous() for x in (q, k, v, g, b.float().sigmoid().to(DTYPE))]
    if step.ends is not None:
        q, k, v, g, beta = (x[None] for x in rows)
        options = {"initial_state": None, "output_final_state": True}
        return partial(fla.chunk_gated_delta_rule, q, k, v, g, beta, **options)
    q, k, v, g, beta = (x[:, None] for x in rows)
    options = {"initial_state": states[step.before], "output_final_state": True}
    return partial(fla.fused_recurrent_gated_delta_rule, q, k, v, g, beta=beta, **options)


def microseconds(calls: list[Callable[[], Any]]) -> float:
    """The median time of a call."""
    for call in calls:
        call()
    run = (lambda: [call() for call in calls]) if DEVICE == "cpu" else captured(calls)
    return 1e6 * statistics.median(sample_seconds(run)) / len(calls)


def measure(operation: Operation, count: int, is_decode: bool, rate: float) -> dict[str, Any]:
    """Compare one point with plain PyTorch if it is small, and time it."""
    ours, inputs = triton_kernels(), operation.make(count)
    slots_of_step = count if is_decode else 1
    numbers = torch.Size(operation.state).numel()
    state_bytes = slots_of_step * numbers * operation.dtype.itemsize
    most = 2 if DEVICE == "cpu" else 64 if is_decode else 4  # outputs of all calls are kept
    turns = min(most, max(2, STATE_BYTES // state_bytes))
    states = torch.randn(1 + turns * slots_of_step, numbers, device=DEVICE, dtype=operation.dtype)
    states[0] = 0
    states = states.view(-1, *operation.state)
    make = decode_step if is_decode else prefill_step
    steps = [make(count, 1 + turn * slots_of_step) for turn in range(turns)]
    row: dict[str, Any] = {
        "operation": operation.name, "model": operation.model,
        "kind": "decode" if is_decode else "prefill", "count": count,
    }  # fmt: skip
    if is_decode or count <= COMPARED:
        out, twin = (
            operation.call(kernels, inputs, states.clone(), steps[0]) for kernels in (ours, PLAIN)
        )
        row["error"] = max_error(out.flatten(1), twin.flatten(1))
    moved = out_bytes(inputs, count, operation) + (1 + is_decode) * state_bytes
    row["bytes"] = moved
    row["us"] = microseconds([partial(operation.call, ours, inputs, states, x) for x in steps])
    if is_decode or DEVICE == "cuda":
        ordered = triton_kernels(one_order=True)
        calls = [partial(operation.call, ordered, inputs, states, step) for step in steps]
        row["ordered_us"] = microseconds(calls)
    row["floor_percent"] = 100 * moved / rate / (row["us"] / 1e6)
    if fla is not None and operation.name == "gated_delta":
        row["fla_us"] = microseconds([fla_call(inputs, states, step) for step in steps[:8]])
    return row


def out_bytes(inputs: Inputs, count: int, operation: Operation) -> int:
    """The bytes of the inputs that tokens have, and of the outputs."""
    read = sum(x.nbytes for x in inputs if torch.is_tensor(x))
    heads = operation.state
    columns = {
        "causal_conv": heads[-1], "gated_delta": heads[0] * heads[-1],
        "state_space": heads[0] * heads[1],
    }  # fmt: skip
    return read + count * columns[operation.name] * DTYPE.itemsize


def format_row(row: dict[str, Any]) -> str:
    """A line of the table; columns that do not apply are empty."""
    unit_of = "rows" if row["kind"] == "decode" else "tokens"
    point = f"{row['operation']}, {row['model']}, {row['kind']} of {row['count']} {unit_of}"
    cells = [f"{row['us']:10.2f}", f"{row['floor_percent']:10.1f}"]
    cells += [
        f"{row[key]:10.2f}" if key in row else f"{'-':>10}" for key in ("ordered_us", "fla_us")
    ]
    cells.append(f"{row['error']:10.4f}" if "error" in row else f"{'-':>10}")
    wrong = "" if row.get("error", 0.0) <= TOLERANCE else "  WRONG"
    return f"{point:52}{''.join(cells)}{wrong}"


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    """Print a table; the exit status says whether all points that were compared were right."""
    args = parse_args(argv, __doc__, [operation.name for operation in operations(quick=True)])
    torch.manual_seed(0)
    machine = measure_machine()
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "Triton's interpreter"
    print(f"{name}: a copy moves {machine.bytes_per_second / 1e9:,.1f} GB/s")
    print(f"{'':52}{'us':>10}{'% floor':>10}{'ordered':>10}{'fla us':>10}{'error':>10}")
    rows = []
    for operation in operations(args.quick):
        if operation.name not in args.only:
            continue
        counts = ((80,), (2,)) if args.quick else (PREFILLS, DECODES)
        for is_decode, some in enumerate(counts):
            for count in some:
                rows.append(measure(operation, count, bool(is_decode), machine.bytes_per_second))
                print(format_row(rows[-1]), flush=True)
                torch.cuda.empty_cache()
    if args.json:
        figures = {"benchmark": "states", "device": name, "points": rows}
        args.json.write_text(json.dumps(figures) + "\n", encoding="utf-8")
    return 0 if all(row.get("error", 0.0) <= TOLERANCE for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
