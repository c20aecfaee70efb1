"""The choice of experts in one kernel, against its twin. On a device, or interpreted."""

from typing import Any

import pytest
import torch

from nanovllm.kernels.operands.routing import ExpertGroups, Routing
from nanovllm.kernels.plain.choose_experts import choose_experts as plain
from nanovllm.kernels.triton.experts.choose_experts import choose_experts, computes

pytestmark = pytest.mark.usefixtures("one_thread")


def by_expert(shares: torch.Tensor, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The share of each expert [T, E], as the order of a token's experts means nothing."""
    assert ids.dtype == torch.long and all(len({*row}) == len(row) for row in ids.tolist())
    return torch.zeros(len(ids), num_experts).scatter(1, ids.cpu(), shares.cpu())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("num_experts", "per_token", "others"),
    [
        (5, 1, dict(normalized=False)), (8, 8, dict(normalized=True)),
        (60, 3, dict(normalized=False, scale=2.5)), (128, 8, dict(normalized=True, scale=2.826)),
        (384, 10, dict(normalized=True, tiny=0.5)),
    ],
)  # fmt: skip
def test_experts_and_shares_are_those_of_the_definition(
    num_experts: int, per_token: int, others: dict[str, Any], scores: Any, has_bias: bool,
    kernel_device: str,
) -> None:  # fmt: skip
    """A bias decides the choice alone; padded experts, up to a power of two, are never chosen."""
    generator = torch.Generator().manual_seed(num_experts)
    outputs = torch.randn(9, num_experts, generator=generator).to(kernel_device) * 2
    bias = torch.randn(num_experts, generator=generator).to(kernel_device) - 3 if has_bias else None
    routing = Routing(per_token=per_token, scores=scores, has_bias=has_bias, **others)
    assert computes(routing)
    found, expected = (f(outputs, routing, bias) for f in (choose_experts, plain))
    torch.testing.assert_close(
        by_expert(*found, num_experts), by_expert(*expected, num_experts), rtol=1e-5, atol=1e-7
    )


def test_of_equal_scores_the_first_experts_are_chosen(kernel_device: str) -> None:
    """And rows that are not finite, as in steps that warm up, choose experts that exist."""
    outputs = torch.tensor([[0.5, 1.0, 1.0, 0.5, 1.0], [0.0] * 5, [float("nan")] * 5])
    routing = Routing(per_token=3, normalized=True, scores="sigmoid", has_bias=True)
    _, ids = choose_experts(outputs.to(kernel_device), routing, torch.zeros(5).to(kernel_device))
    assert ids[:2].tolist() == [[1, 2, 4], [0, 1, 2]]
    assert int(ids.min()) >= 0 and int(ids.max()) < 5


@pytest.mark.parametrize(
    "others",
    [dict(groups=ExpertGroups(4, 2)), dict(soft_cap=0.5), dict(scores="softmax of chosen")],
)
def test_other_choices_are_left_to_plain_pytorch(
    others: dict[str, Any], kernel_device: str
) -> None:
    """A choice that the kernel left out would give other experts or shares."""
    fields: dict[str, Any] = dict(per_token=3, normalized=True, scores="sigmoid") | others
    routing, outputs = Routing(**fields), torch.randn(20, 8).to(kernel_device)
    assert not computes(routing)
    for found, expected in zip(
        choose_experts(outputs, routing), plain(outputs, routing), strict=True
    ):
        assert torch.equal(found, expected)


def test_no_rows_choose_no_experts(kernel_device: str) -> None:
    routing = Routing(per_token=2, normalized=True, scores="sigmoid")
    shares, ids = choose_experts(torch.empty(0, 4).to(kernel_device), routing)
    assert shares.shape == ids.shape == (0, 2)
