"""Experts with biases and a clamped gate: the plain loop and Triton against the definition."""

from dataclasses import replace

import pytest
import torch
from test_experts_kernel import Inputs, Shape, make

from nanovllm.kernels.operands.expert_biases import ExpertBiases
from nanovllm.kernels.operands.low_rank import LowRank
from nanovllm.kernels.table import PLAIN
from nanovllm.layers.lora import PairAdapters, group_rows

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = 1.0  # which many gates and ups reach
SHAPES = [
    Shape(1, 1, 1),
    Shape(70, 4, 5, hidden=80, inside=24, below=1, above=1),
    Shape(130, 2, 4, favourites=True),
    Shape(40, 3, 8, dtype=torch.bfloat16, below=2),
]


def biases_of(inputs: Inputs, last: bool = True) -> ExpertBiases:
    _, gate_up, down, *_ = inputs
    gates, outs = (torch.randn(w.shape[:2], dtype=torch.float32) for w in (gate_up, down))
    return ExpertBiases(gates.to(gate_up), outs.to(down) if last else None, 1.5, LIMIT)


def one_by_one(inputs: Inputs, biases: ExpertBiases) -> torch.Tensor:
    """The definition, in float64: one token and one of its experts at a time."""
    x, gate_up, down, shares = (inputs[i].cpu().double() for i in (0, 1, 2, 4))
    out = torch.zeros_like(x)
    for row, ids in enumerate(inputs[3].tolist()):
        for expert, share in zip(ids, shares[row], strict=True):
            if not 0 <= expert < len(down):
                continue
            both = gate_up[expert] @ x[row] + biases.gate_up[expert].cpu().double()
            gate, up = both.chunk(2)
            gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
            y = down[expert] @ (gate / (1 + (-1.5 * gate).exp()) * (up + 1))
            if biases.down is not None:
                y += biases.down[expert].cpu().double()
            out[row] += share * y
    return out


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_biased_experts_equal_their_definition(
    kernel_device: str, shape: Shape, last: bool
) -> None:
    """A bias of another expert, one without its share, a clamp on the wrong side."""
    from nanovllm.kernels.triton.experts.biased_experts import biased_experts

    inputs = make(shape, kernel_device)
    biases = biases_of(inputs, last)
    expected = one_by_one(inputs, biases)
    error = 1e-4 if shape.dtype == torch.float32 else 5e-2
    for function in (PLAIN.biased_experts, biased_experts):
        out = function(*inputs, biases)
        assert out.dtype == shape.dtype
        torch.testing.assert_close(out.cpu().double(), expected, rtol=error, atol=error)


def test_a_row_without_experts_of_this_rank_is_zero(kernel_device: str) -> None:
    """Its shares must bring no bias."""
    from nanovllm.kernels.triton.experts.biased_experts import biased_experts

    inputs = make(replace(SHAPES[1], tokens=5), kernel_device)
    biases = biases_of(inputs)
    ids = inputs[3] + 100
    for function in (PLAIN.biased_experts, biased_experts):
        out = function(*inputs[:3], ids, *inputs[4:], biases)
        assert torch.equal(out, torch.zeros_like(out))


NUM_SLOTS, RANK = 2, 3


def adapters_of(stack: torch.Tensor, num_parts: int) -> LowRank:
    """Random adapters of the experts' matrices [E, out, in], for each slot and expert."""
    num_experts, size_out, size_in = stack.shape
    groups = NUM_SLOTS * num_experts
    a, b = torch.randn(groups, num_parts * RANK, size_in), torch.randn(groups, RANK, size_out)
    ranks = torch.full((groups, num_parts), RANK, dtype=torch.int32)
    return LowRank(
        a.to(stack) / 8,
        b.to(stack) / 8,
        ranks.to(stack.device),
        (size_out // num_parts,) * num_parts,
    )


def merged(stack: torch.Tensor, adapters: LowRank, slot: int) -> torch.Tensor:
    """The matrices with one slot's adapters added."""
    own = slice(slot * len(stack), (slot + 1) * len(stack))
    a, b = (
        adapters.a[own].unflatten(1, (-1, RANK)),
        adapters.b[own].unflatten(2, (len(adapters.sizes), -1)),
    )
    return stack + torch.einsum("epri,erpo->epoi", a, b).flatten(1, 2)


def test_adapters_of_biased_experts_equal_merged_weights(kernel_device: str) -> None:
    """An adapter added after the gate, without its row's share, or to rows that have none."""
    from nanovllm.kernels.triton.experts.biased_experts import biased_experts

    inputs = make(SHAPES[1], kernel_device)
    x, gate_up, down, *others = inputs
    biases, both = biases_of(inputs), (adapters_of(gate_up, 2), adapters_of(down, 1))
    slots = torch.arange(-1, len(x) - 1, device=x.device, dtype=torch.int32) % 3 - 1
    rows = group_rows(slots, NUM_SLOTS, PLAIN)
    additions = PairAdapters(rows.of_pairs(others[0], len(down)), *both)
    expected = PLAIN.biased_experts(*inputs, biases)
    for slot in range(NUM_SLOTS):
        weights = (merged(w, low, slot) for w, low in zip((gate_up, down), both, strict=True))
        of_slot = PLAIN.biased_experts(x, *weights, *others, biases)
        expected[slots == slot] = of_slot[slots == slot]
    for function in (PLAIN.biased_experts, biased_experts):
        out = function(*inputs, biases, additions=additions)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        alone = function(*inputs, biases)
        assert torch.equal(out[slots < 0], alone[slots < 0])
