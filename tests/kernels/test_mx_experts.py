"""Experts in MXFP4 in Triton's kernels, against the plain loop over their values.

On a device, or interpreted where there is none.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from blocks import random_blocks

from nanovllm.formats.format import Formats, WeightFormat
from nanovllm.formats.in_turn import MxFormat
from nanovllm.formats.mxfp4 import read_mxfp4
from nanovllm.kernels.operands.block_matrix import BlockMatrix
from nanovllm.kernels.operands.block_types import BLOCK_TYPES
from nanovllm.kernels.operands.expert_biases import ExpertBiases
from nanovllm.kernels.plain.biased_experts import biased_experts as plain
from nanovllm.kernels.plain.dequantize_blocks import dequantize
from nanovllm.kernels.table import PLAIN
from nanovllm.layers.biased_experts import BiasedExperts, BiasedSizes
from nanovllm.layers.layer import Build
from nanovllm.layers.ranks import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")

bf16 = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """T tokens that take K of E experts; the first `below` and the last `above` are elsewhere."""

    tokens: int
    per_token: int
    num_experts: int
    hidden: int
    inside: int
    dtype: torch.dtype = torch.float32
    below: int = 0
    above: int = 0
    last: bool = True  # the bias of the second product


def matrices(count: int, size_out: int, size_in: int, device: str) -> list[BlockMatrix]:
    made = (random_blocks("MXFP4", size_out, size_in, seed) for seed in range(count))
    return [BlockMatrix(each.codes.to(device), each.kind) for each in made]


def values(weights: list[BlockMatrix]) -> torch.Tensor:
    return torch.stack([dequantize(each.codes, each.kind).flatten(1) for each in weights]).cpu()


# Sizes that runs of inputs and tiles of outputs do not divide; tiles of 16, 32, 64 and 128 pairs.
SHAPES = [
    Shape(1, 1, 1, 32, 96),
    Shape(9, 3, 6, 160, 96, below=1, above=2, last=False),
    # Few pairs, which are not grouped; some, whose codes registers hold; many in tiles of 16.
    Shape(1, 3, 6, 608, 160, bf16, below=1, above=1),
    Shape(9, 2, 3, 288, 32, bf16, below=1),
    Shape(65, 2, 16, 32, 32, bf16),
    Shape(3, 4, 5, 160, 96, torch.float16, last=False),
    Shape(40, 2, 4, 128, 160, bf16),
    Shape(33, 2, 2, 160, 32, torch.float16, below=1),
    Shape(50, 1, 1, 96, 96, bf16, last=False),
    Shape(130, 1, 1, 64, 160, bf16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_experts_are_those_of_their_values(kernel_device: str, shape: Shape) -> None:
    """Fails if a code, a scale, a bias or a share is another one's, or a clamp is missing."""
    from nanovllm.kernels.triton.experts.biased_experts import biased_experts
    from nanovllm.kernels.triton.experts.mx_stack import arrange_mx_experts

    torch.manual_seed(0)
    hidden, inside, e = shape.hidden, shape.inside, shape.num_experts
    here = e - shape.below - shape.above
    gate_up = matrices(here, 2 * inside, hidden, kernel_device)
    down = matrices(here, hidden, inside, kernel_device)
    x, gates, outs = (
        torch.randn(n, size).to(shape.dtype)
        for n, size in ((shape.tokens, hidden), (here, 2 * inside), (here, hidden))
    )
    shares, ids = torch.randn(shape.tokens, e).softmax(-1).topk(shape.per_token, dim=-1)
    ids -= shape.below

    def biases(to: str | torch.dtype) -> ExpertBiases:
        return ExpertBiases(gates.to(to), outs.to(to) if shape.last else None, 1.5, 1.0)

    expected = plain(
        x.double(), values(gate_up).double(), values(down).double(), ids, shares, e,
        biases(torch.float64),
    )  # fmt: skip
    on = [t.to(kernel_device) for t in (x, ids, shares)]
    stacks = arrange_mx_experts(gate_up), arrange_mx_experts(down)
    out = biased_experts(on[0], *stacks, *on[1:], e, biases(kernel_device)).cpu()
    assert out.dtype == shape.dtype
    error = {torch.float32: 1e-5, torch.float16: 2**-9, bf16: 2**-6}[shape.dtype]
    assert float((out - expected).abs().max()) <= error * float(expected.abs().max())


def test_small_tiles_of_measured_layers_hold_codes() -> None:
    """Of both products; other layers read ahead in stages."""
    from nanovllm.kernels.triton.experts.mx_experts import held_runs

    x = torch.zeros(1, 1, dtype=bf16)
    assert held_runs(16, 128, x, gated=True) == 2 and held_runs(16, 128, x, gated=False) == 3
    assert held_runs(16, 129, x, gated=True) == held_runs(32, 128, x, gated=True) == 0
    assert held_runs(16, 128, x.float(), gated=True) == 0


class Additions:
    """Other numbers for each pair's gates and outputs, as adapters would add them."""

    def __init__(self, pairs: int, gates: int, outputs: int, device: str) -> None:
        self.gates = torch.randn(pairs, gates).to(device)
        self.outputs = torch.randn(pairs, outputs).to(device)

    def add_gates(self, x: torch.Tensor, gates: torch.Tensor) -> None:
        gates += self.gates

    def add_outputs(
        self,
        inner: torch.Tensor,
        outputs: torch.Tensor,
        shares: torch.Tensor,
    ) -> None:
        outputs += self.outputs * shares[:, None]


def test_adapters_add_between_the_products(kernel_device: str) -> None:
    """As they add to plain weights; the fused kernels would leave no place for them."""
    from nanovllm.kernels.triton.experts.biased_experts import biased_experts
    from nanovllm.kernels.triton.experts.mx_stack import arrange_mx_experts

    torch.manual_seed(0)
    gate_up, down = (matrices(3, size, 64, kernel_device) for size in (128, 64))
    x, gates, outs = (torch.randn(n, size) for n, size in ((9, 64), (3, 128), (3, 64)))
    shares, ids = torch.randn(9, 3).softmax(-1).topk(2, dim=-1)
    on = [t.to(kernel_device) for t in (x, ids, shares)]
    biases = ExpertBiases(gates.to(kernel_device), outs.to(kernel_device), 1.5, 1.0)
    additions = Additions(18, 128, 64, kernel_device)
    of_values = [values(each).to(kernel_device) for each in (gate_up, down)]
    expected = plain(on[0], *of_values, *on[1:], 3, biases, additions=additions)
    stacks = arrange_mx_experts(gate_up), arrange_mx_experts(down)
    out = biased_experts(on[0], *stacks, *on[1:], 3, biases, additions)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("largest", [128, 252])
@pytest.mark.parametrize("dtype", [torch.float32, bf16])
def test_all_values_are_exact(kernel_device: str, largest: int, dtype: torch.dtype) -> None:
    """All codes with all scales; each row of x takes one input, so that nothing is added up.

    In bfloat16, with scales whose values are not subnormal, which the interpreter makes zero.
    """
    from nanovllm.kernels.triton.experts.grouping import TiledPairs
    from nanovllm.kernels.triton.experts.mx_experts import multiply
    from nanovllm.kernels.triton.experts.mx_stack import arrange_mx_experts

    kind = BLOCK_TYPES["MXFP4"]
    codes = torch.zeros(largest + 1, 1, kind.num_bytes, dtype=torch.uint8)
    codes[:, 0, 0] = torch.arange(largest + 1).clamp(min=0 if dtype == torch.float32 else 2)
    codes[:, 0, 1:] = torch.arange(16) | torch.arange(16).flip(0) << 4
    weight = BlockMatrix(codes.to(kernel_device), kind)
    stack = arrange_mx_experts([weight])
    assert stack.is_wide == (largest > 128)
    x = torch.eye(32, device=kernel_device, dtype=dtype)
    ones = torch.ones(32, device=kernel_device)
    place = torch.arange(32, dtype=torch.int32, device=kernel_device)
    tiles = torch.tensor([[0, 0, 16], [0, 16, 32]], dtype=torch.int32, device=kernel_device)
    pairs = TiledPairs(place, tiles, place[2:3].clone(), 16)
    out = torch.empty(32, largest + 1, device=kernel_device)
    multiply(x, stack, None, ones, out, pairs)
    assert torch.equal(out.T.cpu(), values([weight])[0])


def test_an_unused_expert_is_not_read(kernel_device: str) -> None:
    """The cost is that of the active ones. A bias that is no number shows every other read."""
    from nanovllm.kernels.triton.experts.biased_experts import biased_experts
    from nanovllm.kernels.triton.experts.mx_stack import arrange_mx_experts

    stacks = [
        arrange_mx_experts(matrices(3, *size, kernel_device)) for size in ((64, 32), (32, 32))
    ]
    gates, outs = torch.zeros(3, 64), torch.zeros(3, 32)
    gates[1] = outs[1] = torch.nan
    biases = ExpertBiases(gates.to(kernel_device), outs.to(kernel_device), 1.0, 7.0)
    ids = torch.tensor([[0, 2], [2, -1]], device=kernel_device)
    out = biased_experts(
        torch.randn(2, 32, device=kernel_device), *stacks, ids,
        torch.ones(2, 2, device=kernel_device), 4, biases,
    )  # fmt: skip
    assert bool(out.isfinite().all())


def test_a_stack_takes_the_bytes_of_the_file() -> None:
    """Except for the padding to whole runs: there are 12 bytes more where a row has no block."""
    from nanovllm.kernels.triton.experts.mx_stack import arrange_mx_experts

    stored = random_blocks("MXFP4", 8, 256)
    assert arrange_mx_experts([stored, stored]).num_bytes == 2 * stored.codes.nbytes


class MxFormats(Formats):
    """Formats of a model in MXFP4."""

    def of_experts(self, num_experts: int) -> dict[str, WeightFormat]:
        (scheme,) = read_mxfp4({}).schemes
        return {name: MxFormat(scheme) for name in self.names.experts}


@pytest.mark.parametrize(("ranks", "kept"), [(Ranks(1, 2), True), (Ranks(1, 4), False)])
def test_a_layer_keeps_whole_blocks_as_they_are_stored(
    kernel_device: str, ranks: Ranks, kept: bool
) -> None:
    """Of four ranks with 16 inputs of a second matrix each, one begins inside of a block."""
    from nanovllm.kernels.triton.experts.mx_stack import MxStack
    from nanovllm.kernels.triton.table import triton_kernels

    torch.manual_seed(0)
    layers = []
    for kernels in (PLAIN, triton_kernels()):
        make = Build(ranks, MxFormats(), 8)
        layer = BiasedExperts(make, 32, BiasedSizes(3, 2, 64, 1.702, 7.0))
        for name, param in layer.named_parameters():
            loaded = torch.randint(119, 122, layer.whole_shape(param, None)).to(param.dtype)
            layer.weight_loader(param, loaded if "bias" not in name else loaded / 120, None)
        layers.append(layer.to(kernel_device))
        layer.bind(SimpleNamespace(kernels=kernels))  # type: ignore[arg-type]
        torch.manual_seed(0)
    assert layers[1].operands is not None
    assert all(isinstance(each, MxStack) == kept for each in layers[1].operands)
    x = torch.randn(4, 32, device=kernel_device)
    shares, ids = torch.randn(4, 3, device=kernel_device).softmax(-1).topk(2, dim=-1)
    plain, triton = (layer(x, ids, shares) for layer in layers)
    torch.testing.assert_close(triton, plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max()))


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", [1, 20, 100, 700])
def test_a_graph_computes_the_experts_of_its_replay(tokens: int) -> None:
    """Experts of the published size. Rows take other experts in the replay."""
    from nanovllm.kernels.triton.experts.biased_experts import biased_experts
    from nanovllm.kernels.triton.experts.mx_stack import arrange_mx_experts

    torch.manual_seed(0)
    size, e = 2880, 8
    weights = matrices(e, 2 * size, size, "cuda"), matrices(e, size, size, "cuda")
    stacks = [arrange_mx_experts(each) for each in weights]
    gates, outs = (torch.randn(e, n, device="cuda").to(bf16) for n in (2 * size, size))
    biases = ExpertBiases(gates, outs, 1.702, 7.0)

    def inputs() -> list[torch.Tensor]:
        shares, ids = torch.randn(tokens, e, device="cuda").softmax(-1).topk(4, dim=-1)
        return [torch.randn(tokens, size, device="cuda").to(bf16), ids, shares]

    static, other = inputs(), inputs()
    biased_experts(static[0], *stacks, *static[1:], e, biases)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = biased_experts(static[0], *stacks, *static[1:], e, biases)
    for target, source in zip(static, other, strict=True):
        target.copy_(source)
    graph.replay()
    dense = (values(each).to("cuda", bf16) for each in weights)
    expected = plain(other[0], *dense, *other[1:], e, biases)
    torch.testing.assert_close(out, expected, rtol=5e-2, atol=2**-6 * float(expected.abs().max()))
