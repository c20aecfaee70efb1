"""The router of experts in one kernel, against its twin. On a device, or interpreted."""

from dataclasses import dataclass

import pytest
import torch
from conftest import kernel_settings
from hypothesis import example, given
from hypothesis import strategies as st

from nanovllm.kernels.operands.routing import Routing
from nanovllm.kernels.operands.scaled import Scaled
from nanovllm.kernels.plain.choose_experts import choose_experts
from nanovllm.kernels.plain.route import route
from nanovllm.kernels.triton.experts import route as module
from nanovllm.kernels.triton.experts.route import Router

pytestmark = pytest.mark.usefixtures("one_thread")

EPS = 1e-6
bf16 = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """T tokens that take K of E experts."""

    tokens: int
    per_token: int
    num_experts: int
    hidden: int = 256
    normalized: bool = True
    parts: int = 1
    seed: int = 0

    @property
    def routing(self) -> Routing:
        """The softmax over all experts."""
        return Routing(per_token=self.per_token, normalized=self.normalized)


SHAPES = st.builds(
    Shape,
    tokens=st.sampled_from([1, 2, 15, 16, 17, 40, 70]),
    per_token=st.integers(1, 5),
    num_experts=st.sampled_from([5, 8, 60, 128]),
    hidden=st.sampled_from([16, 80, 512, 2048]),
    normalized=st.booleans(),
    parts=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**31),
)


def make(shape: Shape, device: str) -> tuple[Scaled, torch.Tensor]:
    """Rows for a norm, and a router's weight, of numbers that bfloat16 holds."""
    torch.manual_seed(shape.seed)
    x = torch.randn(shape.tokens, shape.hidden).to(device, bf16)
    weight = torch.randn(shape.num_experts, shape.hidden) / shape.hidden**0.5
    squares = x.float().square().sum(dim=1, keepdim=True) / shape.parts
    scaled = Scaled(x * 2, squares.expand(-1, shape.parts).contiguous(), EPS)
    return scaled, weight.to(device, bf16).float()


def assert_same_choice(
    shares: torch.Tensor, ids: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, shape: Shape
) -> None:
    """Scores may differ by the order of their sum, which decides between equal experts alone."""
    expected, _ = route(x, weight, shape.per_token, shape.normalized)
    probabilities = (x.double() @ weight.double().T).softmax(dim=-1)
    chosen = probabilities.gather(1, ids.long())
    if shape.normalized:
        chosen = chosen / chosen.sum(dim=1, keepdim=True)
    torch.testing.assert_close(shares, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(chosen.float(), expected, rtol=1e-4, atol=1e-6)
    assert all(len(set(row)) == shape.per_token for row in ids.tolist())


def assert_sorted(router: Router, scaled: Scaled, shape: Shape) -> None:
    """Every pair is in the groups once, with its expert's; and the counters are zero again."""
    routed = router.route_few(scaled)
    order, bounds, tile_ends, num_tiles, block_m = routed.groups
    counts = torch.bincount(routed.ids.flatten().long(), minlength=shape.num_experts)
    assert sorted(order.tolist()) == list(range(shape.tokens * shape.per_token))
    assert torch.equal(routed.ids.flatten()[order.long()], routed.ids.flatten().sort().values)
    assert bounds.tolist() == [0, *counts.cumsum(0).tolist()]
    assert tile_ends.tolist() == counts.add(block_m - 1).div(block_m).long().cumsum(0).tolist()
    assert num_tiles >= int(tile_ends[-1])
    assert not bool(router.counters.any())


@pytest.mark.slow
@kernel_settings(30)
@given(SHAPES)
@example(Shape(1, 1, 5, hidden=16))
@example(Shape(70, 5, 5))  # all experts
@example(Shape(300, 4, 128, hidden=64))  # several chunks of pairs
def test_routes_equal_their_twin(kernel_device: str, shape: Shape) -> None:
    scaled, weight = make(shape, kernel_device)
    router = Router.of(weight, bf16, shape.routing)
    normed = scaled.normed()
    routed = router.route_few(scaled)
    assert_same_choice(routed.shares, routed.ids, normed, weight, shape)
    assert_sorted(router, scaled, shape)
    x = normed.to(bf16)
    found = router.route(x)
    assert_same_choice(*found, x, weight, shape)


@pytest.mark.parametrize("tokens", [3, 100])
def test_a_weight_that_the_rows_type_does_not_hold_stays_float32(
    kernel_device: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A difference below bfloat16's rounding decides; with many rows, too."""
    monkeypatch.setattr(module, "FEW_FLOAT32", 50)
    weight = torch.ones(2, 256, device=kernel_device)
    weight[1] += 2.0**-12
    routing = Routing(per_token=1, normalized=True)
    router = Router.of(weight, bf16, routing)
    assert router.weight.dtype == torch.float32
    assert Router.of(weight.round(), bf16, routing).weight.dtype == bf16
    x = torch.ones(tokens, 256, dtype=bf16, device=kernel_device)
    _, ids = router.route(x)
    assert ids.tolist() == [[1]] * tokens


@pytest.mark.parametrize("tokens", [1, 20, 70])
def test_a_bias_is_added_to_the_scores(
    kernel_device: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, once for all parts of a sum: differences that bfloat16 does not hold decide."""
    monkeypatch.setattr(module, "FEW_FLOAT32", 50)
    scaled, weight = make(Shape(tokens, 3, 32, hidden=2880 // 4), kernel_device)
    bias = torch.randn(32, device=kernel_device)
    bias[5], bias[7] = 40.0, 40.0 + 2**-10  # two of the three, for every row
    weight[7] = weight[5]
    x, routing = scaled.product, Routing(per_token=3, normalized=True)
    for each in (weight, weight * (1 + 2.0**-12)):
        shares, ids = Router.of(each, bf16, routing, bias).route(x)
        expected, chosen = route(x, each, 3, True, bias)
        assert torch.equal(ids, chosen) and ids[:, 0].eq(7).all() and ids[:, 1].eq(5).all()
        torch.testing.assert_close(shares, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "routing",
    [
        Routing(per_token=3, normalized=True, scores="sigmoid", has_bias=True, scale=2.5),
        Routing(per_token=3, normalized=False, scores="sigmoid", scale=0.5),
        Routing(per_token=3, normalized=True, scores="sigmoid", tiny=0.25),
        Routing(per_token=3, normalized=True, has_bias=True),
        Routing(per_token=3, normalized=False, scale=4.0),
    ],
)
@pytest.mark.parametrize(("tokens", "num_experts"), [(1, 64), (70, 12)])
def test_choices_of_one_kernel_are_those_of_the_definition(
    kernel_device: str, routing: Routing, tokens: int, num_experts: int
) -> None:
    """The correction changes which experts are chosen, and no share by itself."""
    assert routing.is_fused
    shape = Shape(tokens, 3, num_experts)
    scaled, weight = make(shape, kernel_device)
    correction = torch.randn(num_experts, device=kernel_device) if routing.has_bias else None
    router = Router.of(weight, bf16, routing, None, correction)
    for x, found in (
        ((rows := scaled.normed().to(bf16)), router.route(rows)),
        (scaled.normed(), (routed := router.route_few(scaled)) and (routed.shares, routed.ids)),
    ):
        shares, ids = choose_experts(x.float() @ weight.T, routing, correction)
        torch.testing.assert_close(found[0], shares, rtol=1e-4, atol=1e-6)
        assert torch.equal(found[1].long(), ids)
    assert_sorted(router, scaled, shape)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_single_row_without_numbers_takes_experts_that_exist(
    kernel_device: str, value: float
) -> None:
    """Its pairs have places of their own in the order, whatever its experts are."""
    shape = Shape(1, 4, 5)
    scaled, weight = make(shape, kernel_device)
    router = Router.of(weight, bf16, shape.routing)
    scaled.product[0] = value
    routed = router.route_few(scaled)
    assert int(routed.ids.min()) >= 0 and int(routed.ids.max()) < 5
    assert sorted(routed.groups.order.tolist()) == [0, 1, 2, 3]
    assert routed.groups.bounds[-1] == 4 and 1 <= routed.groups.tile_ends[-1] <= 4


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_rows_without_numbers_take_experts_that_exist(kernel_device: str) -> None:
    """NaN must not write outside the groups, nor change the experts of other rows."""
    shape = Shape(20, 4, 5)
    scaled, weight = make(shape, kernel_device)
    router = Router.of(weight, bf16, shape.routing)
    expected = router.route_few(scaled)
    scaled.product[3] = torch.nan
    scaled.product[5] = torch.inf
    routed = router.route_few(scaled)
    kept = [row for row in range(20) if row not in (3, 5)]
    assert torch.equal(routed.ids[kept], expected.ids[kept])
    assert torch.equal(routed.shares[kept], expected.shares[kept])
    assert int(routed.ids.min()) >= 0 and int(routed.ids.max()) < 5
    assert sorted(routed.groups.order.tolist()) == list(range(80))
    assert not bool(router.counters.any())


def test_tiles_are_shared_while_processors_are_free() -> None:
    assert module._splits(1, 16, 132) == 8
    assert module._splits(32, 16, 132) == 4
    assert module._splits(200, 16, 132) == 1
    assert module._splits(1, 1, 132) == 1


@pytest.mark.parametrize("room", [88 << 10, 144 << 10, 210 << 10])
@pytest.mark.parametrize("num_experts", [16, 128, 256, 512])
@pytest.mark.parametrize(("rows", "itemsize"), [(16, 2), (16, 4), (64, 2)])
def test_tiles_fit_shared_memory(room: int, num_experts: int, rows: int, itemsize: int) -> None:
    """Of 64 rows, those of all stages: products read one while others are copied."""
    tile = (rows + num_experts) * itemsize
    inputs, stages = module._inputs(tile, room, rows)
    assert 2 <= stages <= 4 and inputs * tile * (stages - (rows == 16)) <= room
