"""Layers with states in one order of sums: a token's bits do not depend on how steps are divided.

The interpreter's sums depend on shapes as those of a GPU do (`gpu_sums`).
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import recurrences
import torch
from gpu_sums import sums_of_a_gpu  # noqa: F401  a fixture
from recurrences import CHECKPOINTS, DUMP, Prefill, decode_step, slots_of
from test_triton_states import Channels, Delta, Shape, Space, assert_close, run

from nanovllm.kernels.operands.state_step import StateStep
from nanovllm.kernels.table import Kernels
from nanovllm.kernels.triton.table import triton_kernels

pytestmark = [
    pytest.mark.usefixtures("one_thread", "sums_of_a_gpu"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
BF16 = torch.bfloat16
TOKENS = 19
# The ends of steps. One token is decoded; more are a prefill, or drafts in a decode step.
WAYS = {
    "a prefill": [0, TOKENS], "chunks": [0, 1, 4, 18, TOKENS], "decode": [*range(TOKENS + 1)],
    "drafts": [0, 9, 12, 15, 18, TOKENS],
}  # fmt: skip
SHAPES = [
    Delta(1, 2, 16, 24, BF16, most=2.0), Channels(1, 12, 20, BF16, lowest=-5.0),
    Channels(1, 16, 16, BF16), Space(2, 4, 12, 20, BF16), Space(1, 1, 24, 16, BF16),
]  # fmt: skip
Rows = slice | list[int]
Compute = Callable[[Rows, torch.Tensor, StateStep], torch.Tensor]


@pytest.fixture(scope="module")
def kernels(kernel_device: str) -> Kernels:
    del kernel_device  # which says whether Triton interprets
    return triton_kernels(one_order=True)


def steps(way: str, device: str) -> Iterator[tuple[slice, StateStep]]:
    """The rows and slots of a sequence's steps. Its state after n tokens is in slot 1 + n % 6."""
    for start, end in pairwise(WAYS[way]):
        slots = 1 + (1 + torch.arange(start, end)) % 6
        before = torch.tensor([1 + start % 6 if start else 0], device=device)
        if way == "decode" or (way == "drafts" and start):
            yield slice(start, end), StateStep(before, slots.to(device), num_queries=end - start)
        else:
            kept = torch.where(torch.arange(end - start) >= end - start - 6, slots, -1)
            yield (
                slice(start, end),
                StateStep(
                    before, kept.to(device), [0, end - start], starts=[start], kept=kept.numpy()
                ),
            )


def in_steps(way: str, states: torch.Tensor, compute: Compute) -> torch.Tensor:
    """The outputs of a sequence, and in `states` those after its last tokens."""
    device = states.device.type
    return torch.cat([compute(rows, states, step) for rows, step in steps(way, device)])


def among_others(states: torch.Tensor, compute: Compute) -> torch.Tensor:
    """The outputs of the sequence if its prefill has others before and after it."""
    lengths = 5, TOKENS, 2
    after = torch.full((sum(lengths),), -1)
    after[5 + TOKENS - 6 : 5 + TOKENS] = 1 + (1 + torch.arange(TOKENS - 6, TOKENS)) % 6
    ends = torch.tensor([0, *lengths]).cumsum(0).numpy()
    step = StateStep(
        torch.tensor([9, 0, 11], device=states.device), after.to(states.device), ends,
        starts=[5, 0, 64], kept=after.numpy(),
    )  # fmt: skip
    rows = [*range(5), *range(TOKENS), 0, 1]
    return compute(rows, states, step)[5 : 5 + TOKENS]


def assert_equal_in_all_ways(states: torch.Tensor, compute: Compute) -> None:
    whole = states.clone()
    expected = in_steps("a prefill", whole, compute)
    assert not torch.equal(whole, states)
    for way in (*WAYS, "among others"):
        found = states.clone()
        is_divided = way in WAYS
        out = in_steps(way, found, compute) if is_divided else among_others(found, compute)
        assert torch.equal(out, expected), way
        assert torch.equal(found[1:7], whole[1:7]), way


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_recurrence_gets_equal_bits_from_every_step(
    shape: Shape, kernels: Kernels, kernel_device: str
) -> None:
    *inputs, states = shape.make(TOKENS, kernel_device)

    def compute(rows: Rows, states: torch.Tensor, step: StateStep) -> torch.Tensor:
        own = [each[rows] if torch.is_tensor(each) else each for each in inputs]
        out, new = run(kernels, shape, (*own, states), step)
        states.copy_(new)
        return out

    assert_equal_in_all_ways(states, compute)


@pytest.mark.parametrize(
    ("channels", "width", "bias", "silu"), [(70, 4, True, True), (64, 3, False, False)]
)
def test_a_convolution_gets_equal_bits_from_every_step(
    channels: int, width: int, bias: bool, silu: bool, kernels: Kernels, kernel_device: str
) -> None:
    torch.manual_seed(0)
    x, weight, biases = (
        torch.randn(*shape).to(kernel_device)
        for shape in ((TOKENS, channels), (channels, width), (channels,))
    )

    def compute(rows: Rows, states: torch.Tensor, step: StateStep) -> torch.Tensor:
        return kernels.causal_conv(x[rows], weight, biases if bias else None, states, step, silu)

    assert_equal_in_all_ways(slots_of((width - 1, channels), torch.float32, kernel_device), compute)


MANY = Prefill((18, 1, 3), (9, 0, 64), {6: CHECKPOINTS, 14: CHECKPOINTS + 1})


@pytest.mark.parametrize("queries", [0, 3])
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_recurrences_in_one_order_are_right(
    shape: Shape, queries: int, kernels: Kernels, kernel_device: str
) -> None:
    """Sequences that begin, and that have no slots; states replace those before them."""
    step = decode_step(queries, kernel_device) if queries else MANY.step(kernel_device)
    inputs = shape.make(len(step.after), kernel_device)
    recurrence = recurrences.space if isinstance(shape, Space) else recurrences.delta
    expected, new = recurrence(*inputs, step)
    out, states = run(kernels, shape, inputs, step)
    assert_close(out, expected, torch.finfo(BF16).eps)
    assert_close(states[:DUMP], new[:DUMP], 2e-6)


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize(("groups", "size"), [(3, 100), (24, 64)])
def test_rows_of_a_gated_norm_do_not_depend_on_others(
    groups: int, size: int, gate_first: bool, kernels: Kernels, kernel_device: str
) -> None:
    torch.manual_seed(0)
    x, gates = torch.randn(2, 9, groups * size).to(kernel_device)
    weight = torch.randn(size).to(kernel_device)

    def compute(rows: int) -> Any:
        parts = (each[:rows].view(rows, groups, size) for each in (x, gates))
        return kernels.gated_norm(*parts, weight, 1e-5, gate_first)

    whole = compute(9)
    for rows in (1, 2, 5):
        assert torch.equal(compute(rows), whole[:rows])
