"""Norm, activation, linear layers and the two ends of the model, each against its formula."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from changed_kernels import changed
from conftest import Products
from rounding import linear_error
from torch import nn

from nanovllm.formats.format import DenseMatrix, Formats, PackedMatrix, WeightFormat
from nanovllm.formats.layouts import KernelMatrix
from nanovllm.kernels.cpu.table import cpu_kernels
from nanovllm.kernels.table import PLAIN
from nanovllm.layers.backend import Backend, TorchBackend
from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.experts import Experts
from nanovllm.layers.feed_forward import SiluAndMul
from nanovllm.layers.gated_attention import GatedAttention
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from nanovllm.layers.plus_one_norm import PlusOneRMSNorm
from nanovllm.layers.ranks import Ranks
from nanovllm.layers.rms_norm import RMSNorm

pytestmark = pytest.mark.usefixtures("one_thread")

BACKEND = Backend(TorchBackend(), PLAIN)
CPU = Backend(TorchBackend(), cpu_kernels())
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# RMSNorm


def rms_norm_twin(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def make_norm(size: int, eps: float, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(size, eps).to(dtype)
    norm.weight.data.uniform_(0.5, 1.5)
    return norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (5, 257), (3, 4, 16), (33, 1024)])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm_equals_its_formula(
    shape: tuple[int, ...], dtype: torch.dtype, eps: float
) -> None:
    """It computes in float32: only the rounding to the type and the weight's product may differ."""
    norm = make_norm(shape[-1], eps, dtype)
    for scale in (1e-3, 1.0, 100.0):
        x = (torch.randn(shape) * scale).to(dtype)
        expected = rms_norm_twin(x, norm.weight, eps)
        out = norm(x)
        assert out.dtype == dtype and out.shape == x.shape
        bound = max(2 * torch.finfo(dtype).eps, 2e-6)
        torch.testing.assert_close(out.double(), expected, rtol=bound, atol=1e-7)


def test_rms_norm_squares_in_float32() -> None:
    """The square of 300 is more than 65,504, the largest float16."""
    out = RMSNorm(64, 1e-6).to(torch.float16)(torch.full((2, 64), 300.0, dtype=torch.float16))
    assert torch.equal(out, torch.ones_like(out))


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(RMSNorm(8, 1e-6)(torch.zeros(2, 8)), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_does_not_change_its_inputs(dtype: torch.dtype) -> None:
    """`x.float()` does not copy a float32 x, so it must not be changed in place."""
    norm = make_norm(64, 1e-6, dtype)
    x, residual = torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype)
    x_before, residual_before = x.clone(), residual.clone()
    norm(x)
    assert torch.equal(x, x_before)
    normed, total = norm.add(x, residual)
    assert torch.equal(x, x_before) and torch.equal(residual, residual_before)
    assert torch.equal(total, x + residual), "the next residual is not the sum"
    assert torch.equal(normed, norm(x + residual))
    storages = {t.untyped_storage().data_ptr() for t in (x, residual, normed, total)}
    assert len(storages) == 4, "an output shares an input's memory"


# SiluAndMul


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (1, 514), (7, 192), (2, 3, 10)])
def test_silu_and_mul_equals_its_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    before = x.clone()
    gate, up = (part.double() for part in x.chunk(2, dim=-1))
    expected = gate / (1 + (-gate).exp()) * up
    out = SiluAndMul()(x)
    assert out.dtype == dtype and torch.equal(x, before)
    bound = max(2 * torch.finfo(dtype).eps, 2e-6)
    torch.testing.assert_close(out.double(), expected, rtol=bound, atol=1e-6)


# Linear layers, with each kind of product


def test_types_without_kernels_stay_plain(products: Products) -> None:
    layer = ReplicatedLinear(4, 4).to(torch.float16)
    layer.weight.data.normal_()
    layer.bind(CPU)
    assert isinstance(layer.matrix, DenseMatrix)
    assert layer(torch.ones(1, 4).half()).dtype == torch.float16


def one_projection(in_features: int, out_features: int, bias: bool) -> LinearBase:
    return MergedColumnParallelLinear(in_features, [out_features], bias)


@pytest.mark.parametrize("kind", [ReplicatedLinear, one_projection, RowParallelLinear])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_gives_the_same_output_when_it_is_bound(
    kind: Callable[..., LinearBase], bias: bool, products: Products
) -> None:
    """And drops the plain weight, if that is copied."""
    layer = kind(37, 21, bias)
    layer.weight.data.normal_()
    if bias:
        layer.bias.data.normal_()
    x = torch.randn(5, 37)
    expected = F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
    layer.bind(CPU)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    layer.bind(CPU)  # a second time does nothing
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert [name for name, _ in layer.named_parameters()] == (["bias"] if bias else [])
    untiled = PackedMatrix if torch.float32 in products.packed else DenseMatrix
    assert type(layer.matrix) is (KernelMatrix if products.tiled else untiled)


# Experts: packed and plain


def make_experts(dtype: torch.dtype) -> tuple[Experts, tuple[torch.Tensor, ...]]:
    """Six experts, and rows with the ids and shares of two of the first five experts each."""
    layer = Experts(6, 40, 24).to(dtype)
    for param in layer.parameters():
        param.data.normal_(0.0, 0.2)
    shares, ids = torch.rand(13, 5).topk(2)
    return layer, (torch.randn(13, 40).to(dtype), ids, shares)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bound_experts_give_the_same_output(dtype: torch.dtype, products: Products) -> None:
    """The plain weights are dropped."""
    layer, inputs = make_experts(dtype)
    expected = layer(*inputs)
    layer.bind(CPU)
    assert layer.matrices is not None and list(layer.parameters()) == []
    layer.bind(CPU)  # a second time does nothing
    error = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(layer(*inputs), expected, rtol=error, atol=error)
    x, ids, shares = inputs
    nothing = layer(x, ids - 6, shares)  # all of them elsewhere
    assert torch.equal(nothing, torch.zeros_like(x))


def test_experts_of_other_kernels_or_types_stay_plain() -> None:
    """Kernels for a device, perhaps interpreted on the CPU, or a type that the CPU cannot pack."""
    layer, inputs = make_experts(torch.float32)
    expected = layer(*inputs)
    kernels = changed(PLAIN, reads_stacks=True, experts=lambda *args: PLAIN.experts(*args) + 1)
    layer.bind(Backend(TorchBackend(), kernels))
    assert torch.equal(layer(*inputs), expected + 1)
    half, inputs = make_experts(torch.float16)
    expected = half(*inputs)
    half.bind(BACKEND)
    assert torch.equal(half(*inputs), expected)


# weight_loader: a checkpoint's tensors in their places


def test_merged_projections_are_loaded_in_order() -> None:
    gate, up = torch.randn(3, 4), torch.randn(5, 4)
    layer = MergedColumnParallelLinear(4, [3, 5])
    # The order of the files is not the order of the shards.
    layer.weight_loader(layer.weight, up, 1)
    layer.weight_loader(layer.weight, gate, 0)
    assert torch.equal(layer.weight, torch.cat([gate, up]))


def test_qkv_shards_are_loaded_in_their_places() -> None:
    """6 heads and 2 kv heads: a q shard is larger than a k shard."""
    shards = {"q": torch.randn(24, 10), "k": torch.randn(8, 10), "v": torch.randn(8, 10)}
    biases = {name: torch.randn(len(shard)) for name, shard in shards.items()}
    layer = QKVParallelLinear(10, 4, 6, 2, bias=True)
    for index, name in sorted(enumerate("qkv"), key=lambda pair: -pair[0]):
        layer.weight_loader(layer.weight, shards[name], index)
        layer.weight_loader(layer.bias, biases[name], index)
    x = torch.randn(3, 10)
    outs = layer(x).split([24, 8, 8], dim=-1)
    for (name, shard), out in zip(shards.items(), outs, strict=True):
        torch.testing.assert_close(out, F.linear(x, shard, biases[name]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_weights_are_cast_to_the_models_type(dtype: torch.dtype) -> None:
    layer, loaded = ReplicatedLinear(3, 2), torch.randn(2, 3).to(dtype)
    layer.weight_loader(layer.weight, loaded, None)
    assert layer.weight.dtype == torch.float32 and torch.equal(layer.weight, loaded.float())


@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (4, 3), (1, 4), (12,), (3, 1), (1, 3, 4)])
def test_misshapen_weights_are_refused(shape: tuple[int, ...]) -> None:
    layer = ReplicatedLinear(4, 3)
    layer.weight.data.zero_()
    with pytest.raises(ValueError, match=r"\(3, 4\)") as error:
        layer.weight_loader(layer.weight, torch.ones(shape), None)
    assert str(shape) in str(error.value)
    assert not layer.weight.any(), "a part was written"


@pytest.mark.parametrize(
    ("shard_id", "shape"), [(0, (8, 10)), (1, (24, 10)), (2, (4, 10)), (2, (8, 9)), (1, (1, 10))]
)
def test_misshapen_qkv_shards_are_refused(shard_id: int, shape: tuple[int, int]) -> None:
    layer = QKVParallelLinear(10, 4, 6, 2, bias=False)
    layer.weight.data.zero_()
    with pytest.raises(ValueError, match="the model needs"):
        layer.weight_loader(layer.weight, torch.ones(shape), shard_id)
    assert not layer.weight.any(), "a part was written"


@dataclass(frozen=True)
class Asked(Formats):
    """Plain weights, and the names of the layers that asked for a format."""

    layers: list[str] = field(default_factory=list)

    def of(self, layer: str) -> WeightFormat:
        self.layers.append(layer)
        return super().of(layer)


def test_attention_with_gates_makes_each_projection_once() -> None:
    """One that is made and replaced takes its memory, and the time to fill it with zeros."""
    formats, norms = Asked(), (PlusOneRMSNorm(8, 1e-6), PlusOneRMSNorm(8, 1e-6))
    heads = KeysAndValues(4, 2, 8)
    mixer = GatedAttention(Build(Ranks(1, 2), formats, 16), 32, heads, head_norms=norms)
    assert formats.layers == ["qkv_proj", "o_proj"]
    projected = mixer.qkv_proj(torch.randn(3, 32))
    assert projected.shape == (3, mixer.gate_size + (2 + 2 * 1) * 8) and mixer.gate_size == 2 * 8


# The two ends


def test_embedding_looks_up_rows() -> None:
    embedding = VocabParallelEmbedding(11, 3)
    embedding.weight.data.copy_(torch.arange(33.0).view(11, 3))
    assert embedding(torch.tensor([10, 0, 10])).tolist() == [[30, 31, 32], [0, 1, 2], [30, 31, 32]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_a_tied_head_keeps_the_embedding(dtype: torch.dtype) -> None:
    embedding, head = VocabParallelEmbedding(259, 16).to(dtype), ParallelLMHead(259, 16).to(dtype)
    head.tie(embedding)
    model = nn.ModuleDict(dict(embedding=embedding, head=head))
    assert [name for name, _ in model.named_parameters()] == ["embedding.weight"]
    embedding.weight.data.normal_()  # what is loaded into one is in the other
    table = embedding.weight.clone()
    hidden = torch.randn(4, 16).to(dtype)
    for _ in range(2):
        logits = head(hidden)
        assert logits.shape == (4, 259) and logits.dtype == dtype
        assert linear_error(logits, hidden, table) <= 1
        assert torch.equal(embedding(torch.arange(259)), table)
        head.bind(BACKEND)


def test_an_untied_head_has_its_own_weight() -> None:
    embedding, head = VocabParallelEmbedding(7, 4), ParallelLMHead(7, 4)
    embedding.weight.data.zero_()
    head.weight.data.fill_(1.0)
    assert head(torch.ones(1, 4)).tolist() == [[4.0] * 7]
