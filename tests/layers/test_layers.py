"""Norm, activation, linear layers and the two ends of the model, each against its formula."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels.cpu.packed_linear import can_pack, cpu_computes, pack, packed_linear
from nanovllm.kernels.table import PLAIN
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention.torch_backend import TorchBackend
from nanovllm.layers.backend import Backend
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.experts import Experts
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from nanovllm.layers.weights.matrix import DenseMatrix

pytestmark = pytest.mark.usefixtures("one_thread")

BACKEND = Backend(TorchBackend(), PLAIN)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# [out, in] of a weight: one output, one input, odd sizes, and some like a model's
SHAPES = [
    (1, 1),
    (1, 257),
    (257, 1),
    (3, 5),
    (17, 257),
    (257, 33),
    (64, 64),
    (259, 128),
    (48, 1000),
]
ROWS = [1, 2, 7, 16, 33, 257]


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


# Linear layers: packed, plain, and by the formula


def linear_error(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> float:
    """The largest error as a share of the rounding error allowed: at most 1 for a right result.

    K products are summed in float32, with an error like the root of K; the product, and in bf16 its
    sum with the bias, are rounded to the type.
    """
    bias = torch.zeros(1) if bias is None else bias
    exact = x.double() @ weight.double().T + bias.double()
    terms = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    eps = torch.finfo(out.dtype).eps
    bound = terms * 2**-23 * (2 + x.shape[1] ** 0.5) + (exact.abs() + bias.double().abs()) * eps
    return float(((out.double() - exact).abs() / (bound + 1e-30)).max())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_linear_and_its_twin_are_exact(
    shape: tuple[int, int], dtype: torch.dtype, bias: bool
) -> None:
    weight = torch.randn(shape).to(dtype)
    if not can_pack(weight):
        pytest.skip(f"this CPU has no kernels for packed {dtype} weights")
    before = weight.clone()
    packed = pack(weight)
    assert torch.equal(weight, before)
    b = torch.randn(shape[0]).to(dtype) if bias else None
    for rows in ROWS:
        x = torch.randn(rows, shape[1]).to(dtype)
        for name, out in (
            ("packed", packed_linear(x, packed, b)),
            ("twin", F.linear(x, weight, b)),
        ):
            assert out.dtype == dtype and out.shape == (rows, shape[0])
            assert linear_error(out, x, weight, b) <= 1, f"{name}, {rows} rows"


def test_packed_linear_reads_strided_inputs() -> None:
    weight, x = torch.randn(33, 64), torch.randn(9, 128)
    if not can_pack(weight):
        pytest.skip("this CPU has no kernels for packed weights")
    for view in (x[:, ::2], x[:, 64:], x.T[:64].T, x[::2, :64], x[3:4, :64]):
        assert linear_error(packed_linear(view, pack(weight), None), view, weight) <= 1


def test_types_that_the_cpu_cannot_pack_stay_plain() -> None:
    assert not can_pack(torch.randn(4, 4, dtype=torch.float64))
    assert not can_pack(torch.randn(4, 4).half())
    assert cpu_computes(torch.float32) and not cpu_computes(torch.float16)
    layer = ReplicatedLinear(4, 4).to(torch.float16)
    layer.weight.data.normal_()
    layer.bind(BACKEND)
    assert isinstance(layer.matrix, DenseMatrix)
    assert layer(torch.ones(1, 4).half()).dtype == torch.float16


def one_projection(in_features: int, out_features: int, bias: bool) -> LinearBase:
    return MergedColumnParallelLinear(in_features, [out_features], bias)


@pytest.mark.parametrize("kind", [ReplicatedLinear, one_projection, RowParallelLinear])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_linear_layer_gives_the_same_output(
    kind: Callable[..., LinearBase], bias: bool
) -> None:
    layer = kind(37, 21, bias)
    layer.weight.data.normal_()
    if bias:
        layer.bias.data.normal_()
    x = torch.randn(5, 37)
    expected = F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
    layer.bind(BACKEND)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    layer.bind(BACKEND)  # a second time does nothing
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_packing_drops_the_plain_weight() -> None:
    layer = ReplicatedLinear(64, 64)
    if not can_pack(layer.weight):
        pytest.skip("this CPU has no kernels for packed weights")
    layer.bind(BACKEND)
    assert [name for name, _ in layer.named_parameters()] == []


# Experts: packed and plain


def make_experts(dtype: torch.dtype) -> tuple[Experts, tuple[torch.Tensor, ...]]:
    """Six experts, and rows with the ids and shares of two of the first five experts each."""
    layer = Experts(6, 40, 24).to(dtype)
    for param in layer.parameters():
        param.data.normal_(0.0, 0.2)
    shares, ids = torch.rand(13, 5).topk(2)
    return layer, (torch.randn(13, 40).to(dtype), ids, shares)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_experts_give_the_same_output(dtype: torch.dtype) -> None:
    """The plain weights are dropped."""
    layer, inputs = make_experts(dtype)
    assert layer.down_proj is not None
    if not can_pack(layer.down_proj):
        pytest.skip(f"this CPU has no kernels for packed {dtype} weights")
    expected = layer(*inputs)
    layer.bind(BACKEND)
    assert layer.matrices is not None and list(layer.parameters()) == []
    layer.bind(BACKEND)  # a second time does nothing
    error = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(layer(*inputs), expected, rtol=error, atol=error)
    x, ids, shares = inputs
    nothing = layer(x, ids - 6, shares)  # all of them elsewhere
    assert torch.equal(nothing, torch.zeros_like(x))


def test_experts_of_other_kernels_or_types_stay_plain() -> None:
    """Kernels for a device, perhaps interpreted on the CPU, or a type that the CPU cannot pack."""
    layer, inputs = make_experts(torch.float32)
    expected = layer(*inputs)
    kernels = replace(PLAIN, experts=lambda *args: PLAIN.experts(*args) + 1)
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
