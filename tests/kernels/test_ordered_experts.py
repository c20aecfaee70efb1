"""Experts with adapters, biases and weights in MXFP4 in one order: rows alone and among others.

Rows with an adapter may be in a step, or not: other rows must not change. Sums are those of
`gpu_sums`.
"""

from collections.abc import Callable

import pytest
import torch
from gpu_sums import sums_of_a_gpu  # noqa: F401  a fixture
from quantized import Format, quantized
from test_biased_experts import adapters_of
from test_mx_experts import matrices, values
from test_ordered_products import (
    assert_alone_as_among_others,
    kernels,  # noqa: F401  a fixture
    random,
)

from nanovllm.kernels.operands.expert_biases import ExpertBiases
from nanovllm.kernels.operands.low_rank import LowRank
from nanovllm.kernels.operands.routing import Routing
from nanovllm.kernels.plain.biased_experts import biased_experts as plain_biased
from nanovllm.kernels.table import Kernels
from nanovllm.layers.lora import PairAdapters, group_rows

pytestmark = pytest.mark.usefixtures("one_thread", "sums_of_a_gpu")

EXPERTS, PER_TOKEN, SLOTS = 3, 2, 2
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PairAdapters | None], torch.Tensor]
# One pair, which may have a kernel of its own; and numbers of pairs with other tiles.
SIZES = [1, 3, 20, 70]


def choices(tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares and the experts of tokens."""
    scores = random(tokens, EXPERTS, device=device, dtype=torch.float32, seed=5)
    shares, ids = scores.softmax(-1).topk(PER_TOKEN, dim=-1)
    return shares, ids


def assert_rows_are_alone(
    layer: Layer, made: Kernels, hidden: int, low_ranks: tuple[LowRank, LowRank], device: str
) -> None:
    """In steps without adapters, and in steps in which some rows have one."""
    x = random(SIZES[-1], hidden, device=device)
    shares, ids = choices(len(x), device)
    slots = torch.arange(len(x), device=device, dtype=torch.int32) % (SLOTS + 1) - 1

    def plain(rows: int) -> torch.Tensor:
        return layer(x[:rows], shares[:rows], ids[:rows], None)

    assert_alone_as_among_others(plain, SIZES)

    def adapted(rows: int) -> torch.Tensor:
        step = group_rows(slots[:rows], SLOTS, made)
        additions = PairAdapters(step.of_pairs(ids[:rows], EXPERTS), *low_ranks)
        return layer(x[:rows], shares[:rows], ids[:rows], additions)

    assert_alone_as_among_others(adapted, SIZES)
    of_step, without = adapted(SIZES[-1]), plain(SIZES[-1])
    assert torch.equal(of_step[slots < 0], without[slots < 0])
    changed = (of_step != without).any(1)
    assert bool(changed[slots >= 0].all())


@pytest.mark.parametrize("form", [None, Format("e4m3", stack=(EXPERTS,))], ids=["plain", "e4m3"])
def test_rows_of_adapted_experts(
    form: Format | None,
    kernels: Kernels,  # noqa: F811
    kernel_device: str,
) -> None:
    """Kernels that fuse the gate, and those that leave room for adapters, round the same."""
    hidden, inner = 80, 64
    stacks = [
        random(EXPERTS, 2 * inner, hidden, device=kernel_device) * 0.2,
        random(EXPERTS, hidden, inner, device=kernel_device, seed=1) * 0.2,
    ]
    low_ranks = adapters_of(stacks[0], 2), adapters_of(stacks[1], 1)
    operands = stacks
    if form is not None:
        operands = [
            kernels.arrange(quantized(*stack.shape[1:], form, kernel_device)) for stack in stacks
        ]

    def layer(
        x: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor, additions: PairAdapters | None
    ) -> torch.Tensor:
        if additions is None:
            return kernels.experts(x, *operands, ids, shares, EXPERTS)
        return kernels.adapted_experts(x, *operands, ids, shares, EXPERTS, additions)

    assert_rows_are_alone(layer, kernels, hidden, low_ranks, kernel_device)


@pytest.mark.parametrize("in_mxfp4", [False, True], ids=["plain", "MXFP4"])
def test_rows_of_biased_experts(
    in_mxfp4: bool,
    kernels: Kernels,  # noqa: F811
    kernel_device: str,
) -> None:
    """One pair alone reads its codes in another kernel by default, in parts."""
    hidden, inner = 288, 32
    weights = [
        matrices(EXPERTS, size_out, size_in, kernel_device)
        for size_out, size_in in ((2 * inner, hidden), (hidden, inner))
    ]
    dense = [values(each).to(kernel_device, torch.bfloat16) for each in weights]
    gates = random(EXPERTS, 2 * inner, device=kernel_device, seed=1)
    outs = random(EXPERTS, hidden, device=kernel_device, seed=2)
    biases = ExpertBiases(gates, outs, 1.702, 1.0)
    operands = [kernels.arrange_mx_experts(each) for each in weights] if in_mxfp4 else dense

    def layer(
        x: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor, additions: PairAdapters | None
    ) -> torch.Tensor:
        return kernels.biased_experts(x, *operands, ids, shares, EXPERTS, biases, additions)

    low_ranks = adapters_of(dense[0], 2), adapters_of(dense[1], 1)
    assert_rows_are_alone(layer, kernels, hidden, low_ranks, kernel_device)
    x, (shares, ids) = random(40, hidden, device=kernel_device), choices(40, kernel_device)
    expected = plain_biased(x, *dense, ids, shares, EXPERTS, biases)
    error = 2**-6 * float(expected.abs().max())
    torch.testing.assert_close(layer(x, shares, ids, None), expected, rtol=5e-2, atol=error)


def test_a_router_adds_what_adapters_add(kernels: Kernels, kernel_device: str) -> None:  # noqa: F811
    """Zeros change nothing; other numbers do, and rows stay alone."""
    weight, bias = random(EXPERTS, 128, device=kernel_device), torch.zeros(EXPERTS)
    routing = Routing(per_token=PER_TOKEN, normalized=True)
    router = kernels.router(weight, torch.bfloat16, routing, bias.to(kernel_device), None)
    assert router is not None
    x = random(70, 128, device=kernel_device, seed=1)
    added = random(70, EXPERTS, device=kernel_device, seed=2) * 4
    added[::2] = 0

    def route(rows: int) -> tuple[torch.Tensor, ...]:
        return router.route(x[:rows], added[:rows])

    assert_alone_as_among_others(route, [1, 17, 70])
    shares, ids = router.route(x)
    more_shares, more_ids = route(70)
    assert torch.equal(more_shares[::2], shares[::2]) and torch.equal(more_ids[::2], ids[::2])
    scores = x.float() @ weight.float().T + added.float()
    best, expected = scores.topk(PER_TOKEN, dim=1)
    assert torch.equal(more_ids, expected)
    torch.testing.assert_close(more_shares, best.softmax(1), rtol=1e-3, atol=1e-3)
