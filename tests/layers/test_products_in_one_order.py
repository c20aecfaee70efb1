"""Layers on a CPU have the same bits for a row alone and among others."""

from collections.abc import Callable, Iterator

import pytest
import torch
from conftest import PRODUCTS

from nanovllm.formats.format import PLAIN_FORMATS
from nanovllm.kernels.cpu.table import cpu_kernels
from nanovllm.kernels.operands.routing import Routing
from nanovllm.kernels.plain.sigmoid import sigmoid
from nanovllm.kernels.table import PLAIN
from nanovllm.layers.activations import ACTIVATIONS, activation_of
from nanovllm.layers.backend import Backend, TorchBackend
from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.experts import Experts
from nanovllm.layers.gelu_experts import GeluExperts
from nanovllm.layers.latent_expansion import LatentExpansion
from nanovllm.layers.latent_sizes import LatentSizes
from nanovllm.layers.layer import Build
from nanovllm.layers.output_gate import SoftplusGate
from nanovllm.layers.ranks import ALONE
from nanovllm.layers.shared_experts import SharedSparseMLP
from nanovllm.layers.shared_group_norm import SharedGroupNorm
from nanovllm.layers.sparse_gelu import SparseGeluAndMul
from nanovllm.layers.state_space import StateSpace
from nanovllm.layers.state_space_mixer import StateSpaceMixer

pytestmark = pytest.mark.usefixtures("compiler")

KERNELS = cpu_kernels(one_order=True)
COUNTS = (*range(1, 20), 37, 40, 55, 70)  # PyTorch has another order for some of them
DTYPES = [torch.float32, torch.bfloat16]
MAKE = Build(ALONE, PLAIN_FORMATS, 64)
SIZES = LatentSizes(
    num_heads=3, query_rank=None, rank=320, plain=40, rotated=8, value=24, has_bias=False,
    interleaved=True, scale=1.0,
)  # fmt: skip

Function = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True, params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where oneDNN is faster, and with threads whose parts of a batch end within a row."""
    PRODUCTS["packed"].use(monkeypatch)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def check(function: Function, x: torch.Tensor) -> torch.Tensor:
    """The result for all rows; those of fewer rows must have the same bits."""
    whole = function(x)
    for count in COUNTS:
        assert torch.equal(function(x[:count]), whole[:count]), count
        assert torch.equal(function(x[-count:]), whole[-count:]), -count
    return whole


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_sigmoids(size: int, dtype: torch.dtype) -> None:
    x, gate = (torch.randn(80, size + 3).to(dtype)[:, 3:] for _ in range(2))
    found = check(sigmoid, gate)
    torch.testing.assert_close(found, gate.sigmoid())
    both = torch.cat([x, gate], 1)
    for kernels in (KERNELS, PLAIN):
        multiply = kernels.sigmoid_and_mul
        opened = check(lambda row, f=multiply: f(row[:, :size].clone(), row[:, size:]), both)  # type: ignore[misc]
        torch.testing.assert_close(opened, x * gate.sigmoid())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
def test_experts_with_their_router_and_gates(scores: str, dtype: torch.dtype) -> None:
    routing = Routing(per_token=2, normalized=True, scores=scores)  # type: ignore[arg-type]
    torch.set_default_dtype(dtype)
    try:
        layer = SharedSparseMLP(MAKE, 72, 24, 7, routing, shared_size=40, is_gated=True)
    finally:
        torch.set_default_dtype(torch.float32)
    for param in layer.parameters():
        param.data.normal_(0.0, 0.2)
    x = torch.randn(90, 72).to(dtype)
    expected = layer(x)
    for module in layer.modules():
        if hasattr(module, "bind"):
            module.bind(Backend(TorchBackend(), KERNELS))
    found = check(layer, x)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_without_gates(name: str, dtype: torch.dtype) -> None:
    layer, x = activation_of(name), torch.randn(91, 400).to(dtype)
    expected = layer(x.clone())
    layer.bind(Backend(TorchBackend(), KERNELS))  # type: ignore[attr-defined]
    torch.testing.assert_close(check(lambda rows: layer(rows.clone()), x), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_gelu(dtype: torch.dtype) -> None:
    layer, x = SparseGeluAndMul(0.5, 400), torch.randn(91, 800).to(dtype)
    expected = layer(x)
    layer.bind(Backend(TorchBackend(), KERNELS))
    torch.testing.assert_close(check(layer, x), expected)


def test_gates_by_softplus() -> None:
    heads = KeysAndValues(num_heads=51, num_kv_heads=17, head_dim=8)
    layer, values = SoftplusGate(MAKE, 24, heads, gates=8), torch.randn(91, 408) * 9

    def gated(gates: torch.Tensor) -> torch.Tensor:
        return layer.gated(torch.ones_like(gates), gates)

    expected = gated(values)
    layer.attn.bind(Backend(TorchBackend(), KERNELS))
    torch.testing.assert_close(check(gated, values), expected)


def test_gates_of_state_spaces_without_a_norm() -> None:
    space = StateSpace(num_heads=51, head_dim=8, num_groups=1, state_size=4, width=3, norm=None)
    opened, gates = StateSpaceMixer(MAKE, 24, space, 1e-5).opened, torch.randn(91, 408)
    expected = opened(gates)
    opened.bind(Backend(TorchBackend(), KERNELS))
    torch.testing.assert_close(check(opened, gates), expected)


def test_gates_of_groups_that_ranks_share() -> None:
    layer = SharedGroupNorm(408, 1e-6, num_groups=1, gate_first=True, ranks=ALONE)
    check(lambda gates: layer(torch.ones_like(gates), gates), torch.randn(91, 408))


@pytest.mark.parametrize("kind", [Experts, GeluExperts])
def test_activations_of_experts(kind: type[Experts]) -> None:
    """91 rows of 400 numbers: PyTorch divides them within a row."""
    layer = kind(2, 40, 400)
    for param in layer.parameters():
        param.data.normal_(0.0, 0.2)
    layer.bind(Backend(TorchBackend(), KERNELS))

    def both(x: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(2).expand(len(x), 2)
        out: torch.Tensor = layer(x, ids, torch.full((len(x), 2), 0.5))
        return out

    check(both, torch.randn(91, 40))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_expansion_of_latents(dtype: torch.dtype) -> None:
    layer = LatentExpansion(SIZES)
    weight = torch.randn(SIZES.expanded_size, SIZES.rank).to(dtype)
    layer.get_parameter("weight").data = weight
    queries = torch.randn(80, 3, SIZES.plain + SIZES.rotated).to(dtype)[..., : SIZES.plain]
    sums = torch.randn(80, 3, SIZES.rank).to(dtype)

    def fold(queries: torch.Tensor) -> torch.Tensor:
        out = queries.new_zeros(len(queries), 3, SIZES.rank + SIZES.rotated)
        layer.fold(queries, out[..., : SIZES.rank])
        return out

    expected = fold(queries), layer.unfold(sums)
    layer.bind(Backend(TorchBackend(), KERNELS))
    assert layer.matrix is not None and torch.equal(layer.matrix.plain(), weight)
    for found, plain in zip(
        (check(fold, queries), check(layer.unfold, sums)), expected, strict=True
    ):
        torch.testing.assert_close(
            found, plain, rtol=0.02, atol=2e-5 if found.itemsize == 4 else 0.5
        )
