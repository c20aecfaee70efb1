"""Triton's kernels of layers with states, against recurrences in float64 and their twins."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import recurrences
import torch
from recurrences import CHECKPOINTS, DUMP, Prefill, decode_step, slots_of

from nanovllm.engine.cache.padded_states import PaddedStates
from nanovllm.engine.run.device_table import NO_CHANGES
from nanovllm.engine.run.padded import PrefillSize
from nanovllm.engine.run.step_inputs import PrefillInputs, StepInputs
from nanovllm.kernels.operands.rates import ChannelRates, DeltaRates, SpaceRates
from nanovllm.kernels.operands.state_chunks import divide
from nanovllm.kernels.operands.state_step import StateStep
from nanovllm.kernels.table import PLAIN
from nanovllm.kernels.triton.state import causal_conv
from nanovllm.kernels.triton.table import triton_kernels

pytestmark = [
    pytest.mark.usefixtures("one_thread", "kernel_device"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
TRITON = triton_kernels()

OPERATIONS = {"Delta": "gated_delta", "Channels": "channel_delta", "Space": "state_space"}
# Around the borders of chunks. Kept are the 7th and 103rd token of the fifth sequence, and tokens
# before and at the ends of the last one's chunks.
LENGTHS = (1, 63, 64, 65, 130, 200)
BEFORE = sum(LENGTHS[:4]), sum(LENGTHS[:5])
MANY = Prefill(
    LENGTHS, (9, 0, 64, 60, 10, 100),
    {BEFORE[0] + 6: CHECKPOINTS, BEFORE[0] + 102: CHECKPOINTS + 1, BEFORE[1] + 11: CHECKPOINTS + 2,
     BEFORE[1] + 27: CHECKPOINTS + 3, BEFORE[1] + 28: CHECKPOINTS + 4},
)  # fmt: skip
FEW = Prefill((5, 1, 16, 2), (9, 0, 60, 3), {7: CHECKPOINTS, 21: CHECKPOINTS + 1})


@dataclass(frozen=True)
class Delta:
    """Heads of a gated delta rule, and how strongly they forget."""

    key_heads: int = 1
    heads: int = 2
    dk: int = 16
    dv: int = 16
    dtype: torch.dtype = torch.float32
    log_rate: float = 0.0
    most: float = 1.0

    def make(self, tokens: int, device: str) -> tuple[Any, ...]:
        torch.manual_seed(tokens)
        columns = 2 * self.key_heads * self.dk + self.heads * self.dv
        qkv = torch.randn(tokens, columns).to(device, self.dtype)
        # Keys that are alike, as after a convolution, make corrections large.
        keys = qkv[:, self.key_heads * self.dk : 2 * self.key_heads * self.dk]
        keys += keys[:1]
        a, b = torch.randn(tokens, 2 * self.heads).to(device, self.dtype).chunk(2, dim=1)
        log_rate, bias = torch.full((self.heads,), self.log_rate), torch.randn(self.heads)
        rates = DeltaRates(log_rate.to(device), bias.to(device), self.most)
        return qkv, a, b, rates, slots_of((self.heads, self.dk, self.dv), torch.float32, device)


@dataclass(frozen=True)
class Channels:
    """Heads of a gated delta rule whose channels forget by themselves."""

    heads: int = 2
    dk: int = 16
    dv: int = 16
    dtype: torch.dtype = torch.float32
    log_rate: float = 0.0
    lowest: float | None = None

    def make(self, tokens: int, device: str) -> tuple[Any, ...]:
        alike = Delta(self.heads, self.heads, self.dk, self.dv, self.dtype, self.log_rate)
        qkv, _, b, rates, states = alike.make(tokens, device)
        size = self.heads * self.dk
        a = torch.randn(tokens, 2 * size).to(device, self.dtype)[:, size:]
        bias = torch.randn(size).to(device)
        return qkv, a, b, ChannelRates(rates.log_rate, bias, self.lowest), states


@dataclass(frozen=True)
class Space:
    """Heads of a state space."""

    groups: int = 1
    heads: int = 2
    dim: int = 16
    size: int = 16
    dtype: torch.dtype = torch.float32
    log_rate: float = 0.0
    high: float = float("inf")

    def make(self, tokens: int, device: str) -> tuple[Any, ...]:
        torch.manual_seed(tokens)
        columns = self.heads * self.dim + 2 * self.groups * self.size
        xbc = torch.randn(tokens, columns).to(device, self.dtype)
        dt = torch.randn(tokens, 2 * self.heads).to(device, self.dtype)[:, self.heads :]
        rate, bias, skip = (torch.randn(self.heads).to(device) for _ in range(3))
        rates = SpaceRates(torch.full_like(rate, self.log_rate), bias - 2, skip, 0.01, self.high)
        return xbc, dt, rates, slots_of((self.heads, self.dim, self.size), torch.float32, device)


Shape = Delta | Channels | Space
SHAPES: list[Shape] = [
    Delta(), Delta(2, 4, 12, 20, log_rate=2.0, most=2.0), Delta(1, 1, 64, 64, log_rate=-6.0),
    Delta(1, 1, 128, 128), Delta(1, 2, 16, 24, torch.bfloat16, -3.0),
    Delta(1, 1, 64, 64, torch.bfloat16, 1.0), Delta(1, 1, 24, 16, torch.float16),
    Space(), Space(2, 4, 12, 20, log_rate=2.0, high=0.2), Space(1, 1, 64, 64, log_rate=-6.0),
    Space(1, 1, 64, 128), Space(1, 2, 16, 24, torch.bfloat16, -3.0),
    Space(1, 1, 64, 64, torch.bfloat16, 1.0), Space(1, 1, 24, 16, torch.float16),
]  # fmt: skip
# Of the largest number: float32 with sums in another order, and products of rounded numbers.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


def run(kernels: Any, shape: Shape, inputs: tuple[Any, ...], step: StateStep) -> Any:
    """The outputs and the states."""
    *others, states = inputs
    states = states.clone()
    return getattr(kernels, OPERATIONS[type(shape).__name__])(*others, states, step), states


def assert_close(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert float(error) <= bound, f"{float(error):.2e} of the largest"


def check(shape: Shape, step: StateStep, device: str, bound: float) -> None:
    inputs = shape.make(len(step.after), device)
    recurrence = recurrences.space if isinstance(shape, Space) else recurrences.delta
    expected, new = recurrence(*inputs, step)
    out, states = run(TRITON, shape, inputs, step)
    assert out.dtype == shape.dtype
    assert_close(out, expected, max(bound, torch.finfo(shape.dtype).eps))
    written = step.after[step.after >= 0].unique()
    assert_close(states[written], new[written], bound)
    others = [slot for slot in range(len(states)) if slot not in written.tolist()]
    assert torch.equal(states[others], inputs[-1][others])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_is_the_recurrence(shape: Shape, kernel_device: str) -> None:
    """Chunks end early at kept tokens, and states replace those that they began with."""
    check(shape, MANY.step(kernel_device), kernel_device, BOUNDS[shape.dtype])


@pytest.mark.parametrize("queries", [0, 1, 3])
@pytest.mark.parametrize(
    "shape", [Delta(2, 4, 12, 20, torch.bfloat16), Delta(dk=128, dv=64), Space(2, 4, 12, 20),
              Channels(2, 12, 20, torch.bfloat16, lowest=-5.0), Channels(1, 128, 64),
              Space(1, 2, 32, 128, torch.bfloat16)], ids=str
)  # fmt: skip
def test_few_tokens_are_the_recurrence(shape: Shape, queries: int, kernel_device: str) -> None:
    """Of decode steps, or of a prefill of few tokens each: in float32 inside for all types."""
    step = decode_step(queries, kernel_device) if queries else FEW.step(kernel_device)
    check(shape, step, kernel_device, BOUNDS[torch.float32])


@pytest.mark.parametrize("shape", [Delta(dtype=torch.bfloat16), Space(dtype=torch.bfloat16)])
def test_a_sequence_depends_on_no_other_one_and_on_no_step(
    shape: Shape, kernel_device: str
) -> None:
    """Positions decide where chunks end: not the step, nor the rows."""
    inputs = shape.make(sum(LENGTHS), kernel_device)
    out, states = run(TRITON, shape, inputs, MANY.step(kernel_device))
    rows = slice(BEFORE[0], BEFORE[1])
    slot = LENGTHS.index(130)
    own = [each[rows] if torch.is_tensor(each) else each for each in inputs[:-1]]
    kept = {6: CHECKPOINTS, 102: CHECKPOINTS + 1}
    before = inputs[-1].clone()
    before[1] = before[1 + slot]
    alone, alone_states = run(TRITON, shape, (*own, before), Prefill((130,), (10,), kept).step(
        kernel_device
    ))  # fmt: skip
    assert torch.equal(alone, out[rows]) and torch.equal(alone_states[1], states[1 + slot])
    for start, end in ((0, 54), (54, 130)):  # the second one begins at position 64
        part = [each[start:end] if torch.is_tensor(each) else each for each in own]
        marks = {row - start: slot for row, slot in kept.items() if start <= row < end}
        step = Prefill((end - start,), (10 + start,), marks).step(kernel_device)
        outs, before = run(TRITON, shape, (*part, before), step)
        assert torch.equal(outs, alone[start:end])
    assert torch.equal(before[1], alone_states[1])


def padded_step(step: StateStep, num_rows: int, device: str) -> StateStep:
    """A step in memory for more rows and sequences, as captured prefills have it."""
    ends = step.ends
    others = [np.zeros(0, np.int64)] * 5
    prefill = PrefillInputs(np.zeros(ends[-1], np.int64), *others[:2], ends, ends, *others[:3])
    arrays = {
        "states_before": step.before.cpu().numpy(), "states_after": step.after.cpu().numpy(),
        "states_starts": step.starts,
    }  # fmt: skip
    inputs = StepInputs(len(ends) - 1, 0, NO_CHANGES, prefill, arrays=arrays)
    padded = PaddedStates(PrefillSize(num_rows, len(ends) + 2))
    words = torch.full((padded.words,), 77)
    fill = padded.filler(inputs)
    assert fill is not None
    fill(words.numpy())
    return padded.read(words.to(device))


@pytest.mark.parametrize("prefill", [MANY, FEW], ids=["many", "few"])
@pytest.mark.parametrize(
    "shape", [Delta(1, 1, 64, 32, torch.bfloat16), Delta(), Channels(), Space(),
              Space(1, 2, 32, 16, torch.bfloat16)], ids=str
)  # fmt: skip
def test_padding_changes_no_sequence(shape: Shape, prefill: Prefill, kernel_device: str) -> None:
    step = prefill.step(kernel_device)
    rows = len(step.after)
    *inputs, states = shape.make(rows + 80, kernel_device)
    own = [each[:rows] if torch.is_tensor(each) else each for each in inputs]
    out, new = run(TRITON, shape, (*own, states), step)
    padded = padded_step(step, rows + 80, kernel_device)
    found, found_states = run(TRITON, shape, (*inputs, states), padded)
    assert torch.equal(found[:rows], out) and not found[rows:].any()
    assert torch.equal(found_states[:DUMP], new[:DUMP])
    x = inputs[0][:, :64]
    weight, old = x[:4].T.contiguous(), slots_of((3, x.shape[1]), shape.dtype, kernel_device)
    kept = old.clone()
    out = TRITON.causal_conv(x[:rows], weight, None, old, step, True)
    found = TRITON.causal_conv(x, weight, None, kept, padded, True)
    assert torch.equal(found[:rows], out) and not found[rows:].any()
    assert torch.equal(kept[:DUMP], old[:DUMP])


def test_steps_with_many_kept_states_do_not_fit() -> None:
    """Each kept state within a sequence ends a chunk; such a step is not computed by a graph."""
    kept = dict.fromkeys(range(20, 120), CHECKPOINTS)
    step = Prefill((130,), (0,), kept).step("cpu")
    prefill = PrefillInputs(*[np.zeros(0, np.int64)] * 3, step.ends, *[np.zeros(0, np.int64)] * 4)
    arrays = {"states_starts": step.starts, "states_after": step.after.numpy()}
    inputs = StepInputs(1, 0, NO_CHANGES, prefill, arrays=arrays)
    assert PaddedStates(PrefillSize(192, 9)).filler(inputs) is None
    arrays["states_after"][20:118] = -1
    assert PaddedStates(PrefillSize(192, 9)).filler(inputs) is not None


def test_chunks_end_at_positions_kept_tokens_and_sequences() -> None:
    """Sequences with few tokens come last, with their chunks."""
    ends, starts = torch.tensor([0, 2, 72, 90]).numpy(), torch.tensor([63, 60, 5]).numpy()
    after = torch.full((90,), -1)
    after[[0, 1, 5, 10, 71, 89]] = 7
    found = divide(ends, starts, after.numpy(), torch.device("cpu"))
    assert found.chunks.tolist() == [
        [2, 4, 1, 2], [6, 5, 1, 2], [11, 59, 1, 2], [70, 2, 1, 2], [72, 18, 2, 72],
        [0, 1, 0, 0], [1, 1, 0, 0],
    ]  # fmt: skip
    assert found.kept.tolist() == [0, 1, 5, 10, 71, 89]
    assert found.parts.tolist() == [
        [1, 2, 70, 0, 4, 2, 5, 0], [2, 72, 18, 4, 5, 5, 6, 0], [0, 0, 2, 5, 7, 0, 2, 0],
    ]  # fmt: skip
    assert (found.num_long, found.num_long_chunks) == (2, 5)
    assert found.long.tolist() + found.short.tolist() == found.parts.tolist()


def test_chunks_are_those_of_slots_that_only_the_device_knows() -> None:
    """Steps of tests and of other engines have no copy of `after` on the host."""
    step = MANY.step("cpu")
    other = StateStep(step.before, step.after, step.ends, starts=step.starts)
    for name, table in step.chunks._asdict().items():
        found = getattr(other.chunks, name)
        assert torch.equal(found, table) if torch.is_tensor(table) else found == table


@pytest.mark.parametrize("step", ["many", "few", 1, 3], ids=str)
@pytest.mark.parametrize(
    ("channels", "width", "bias", "silu", "dtype"),
    [(150, 4, True, True, torch.float32), (64, 3, False, False, torch.bfloat16),
     (70, 2, False, True, torch.float16)],
)  # fmt: skip
def test_convolutions_are_their_twins(
    step: str | int, channels: int, width: int, bias: bool, silu: bool, dtype: torch.dtype,
    kernel_device: str,
) -> None:  # fmt: skip
    """The windows after a sequence's first tokens have inputs from before, also replaced ones."""
    torch.manual_seed(0)
    made: StateStep = (
        decode_step(step, kernel_device)
        if isinstance(step, int)
        else {"many": MANY, "few": FEW}[step].step(kernel_device)
    )
    x = torch.randn(len(made.after), channels + 16).to(kernel_device, dtype)[:, :channels]
    weight, biases = (
        torch.randn(*shape).to(kernel_device, dtype) for shape in ((channels, width), (channels,))
    )
    old = slots_of((width - 1, channels), dtype, kernel_device)
    found, expected = old.clone(), old.clone()
    out, twin = (
        kernels.causal_conv(x, weight, biases if bias else None, states, made, silu)
        for kernels, states in ((TRITON, found), (PLAIN, expected))
    )
    info = torch.finfo(dtype)
    torch.testing.assert_close(out, twin, rtol=2 * info.eps, atol=1e-5)
    assert torch.equal(found[:DUMP], expected[:DUMP]) and torch.equal(found[DUMP], old[DUMP])


def test_a_program_for_several_sequences_leaves_the_rest_alone(
    monkeypatch: pytest.MonkeyPatch, kernel_device: str
) -> None:
    """Of decode steps with many sequences: here one program has all four, and four that are not."""
    monkeypatch.setattr(causal_conv, "MANY_SEQUENCES", 1)
    monkeypatch.setattr(causal_conv, "ROWS", 8)
    test_convolutions_are_their_twins(3, 150, 4, True, True, torch.float32, kernel_device)


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize(
    ("shape", "shared", "dtype"),
    [((3, 5, 100), True, torch.bfloat16), ((2, 2, 2100), False, torch.float32),
     ((7, 1, 16), False, torch.float16)],
)  # fmt: skip
def test_gated_norms_are_their_twins(
    shape: tuple[int, ...], shared: bool, gate_first: bool, dtype: torch.dtype, kernel_device: str
) -> None:
    torch.manual_seed(0)
    rows, groups, size = shape
    x = torch.randn(shape).to(kernel_device, dtype)
    gate = torch.randn(rows, groups * size + 8).to(kernel_device, dtype)[:, 8:].view(shape)
    weight = torch.randn(shape[1:]).to(kernel_device, dtype)
    inputs = x, gate, weight[0] if shared else weight, 1e-5, gate_first
    out, twin = TRITON.gated_norm(*inputs), PLAIN.gated_norm(*inputs)
    assert out.dtype == twin.dtype
    # Twice rounded: a value on the other side of a boundary may be followed by another one.
    info = torch.finfo(dtype)
    torch.testing.assert_close(out, twin, rtol=2 * info.eps, atol=1e-6)
    if dtype != torch.float32:
        assert (out != twin).float().mean() < 0.02


LARGE = Prefill((1000, 4099, 17, 1, 640), (0, 100, 30, 7, 64), {999 + 64: CHECKPOINTS})
LARGE_SHAPES: list[Shape] = [
    Delta(16, 32, 128, 128, torch.bfloat16, -2.0), Delta(4, 4, 64, 64, torch.bfloat16),
    Delta(6, 6, 96, 192, torch.bfloat16, most=2.0), Delta(4, 8, 256, 256, torch.bfloat16),
    Delta(4, 8, 128, 128, torch.float16), Delta(4, 8, 128, 128, torch.float32),
    Channels(32, 128, 128, torch.bfloat16), Channels(32, 128, 128, torch.bfloat16, 1.0, -5.0),
    Channels(4, 128, 128),
    Space(1, 80, 64, 128, torch.bfloat16), Space(8, 128, 64, 128, torch.bfloat16, 1.0),
    Space(1, 48, 64, 256, torch.bfloat16), Space(1, 24, 64, 128, torch.float16),
    Space(1, 24, 64, 128, torch.float32),
]  # fmt: skip


@pytest.mark.cuda
@pytest.mark.parametrize("shape", LARGE_SHAPES, ids=str)
def test_long_prompts_are_their_twins_on_the_device(shape: Shape, kernel_device: str) -> None:
    """Of models' sizes. Each sequence alone says which one is wrong."""
    step = LARGE.step(kernel_device)
    inputs = shape.make(len(step.after), kernel_device)
    out, states = run(TRITON, shape, inputs, step)
    twin, expected = run(PLAIN, shape, inputs, step)
    bound = 4 * BOUNDS[shape.dtype]
    ends = LARGE.ends.tolist()
    for start, end in pairwise(ends):
        assert_close(out[start:end], twin[start:end], bound)
    for slot in (1, 2, 3, 4, 5, CHECKPOINTS):
        assert_close(states[slot], expected[slot], bound)


@pytest.mark.cuda
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("sequences", [1, 200])
@pytest.mark.parametrize("shape", LARGE_SHAPES, ids=str)
def test_decode_is_its_twin_on_the_device_and_in_graphs(
    shape: Shape, sequences: int, queries: int, kernel_device: str
) -> None:
    """A graph's kernels start early: they must not read a state before it is written."""
    tokens = sequences * queries
    *others, some = shape.make(tokens, kernel_device)
    states = some[torch.arange(tokens + 2, device=kernel_device) % len(some)].contiguous()
    after = 1 + torch.arange(tokens, device=kernel_device)
    step = StateStep(after.view(sequences, -1)[:, -1].contiguous(), after, num_queries=queries)
    operation = OPERATIONS[type(shape).__name__]
    found, expected = states.clone(), states.clone()
    call = getattr(TRITON, operation)
    call(*others, states.clone(), step)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [call(*others, found, step) for _ in range(3)]
    graph.replay()
    twins = [getattr(PLAIN, operation)(*others, expected, step) for _ in range(3)]
    eps = torch.finfo(shape.dtype).eps
    for out, twin in zip(outs, twins, strict=True):
        assert_close(out, twin, max(1e-5, 2 * eps))
    assert_close(found[:-1], expected[:-1], 1e-5)
