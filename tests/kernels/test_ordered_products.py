"""Products, experts, adapters and heads' norms in one order of sums: rows alone and among others.

The interpreter's products and sums depend on shapes as those of a GPU do (`gpu_sums`).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from changed_kernels import changed
from gpu_sums import sums_of_a_gpu  # noqa: F401  a fixture
from quantized import Format, quantized
from test_lora_kernels import Shape, compute, make

from nanovllm.engine.run.logprobs import log_probabilities
from nanovllm.formats.format import PLAIN_FORMATS
from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.kernels.operands.routing import Routing
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.kernels.triton.table import triton_kernels
from nanovllm.layers.backend import Backend
from nanovllm.layers.full_width_norm import FullWidthNorm
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.layers.ranks import Ranks

pytestmark = pytest.mark.usefixtures("one_thread", "sums_of_a_gpu")
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def kernels(kernel_device: str) -> Kernels:
    del kernel_device  # which says whether Triton interprets
    return triton_kernels(one_order=True)


def random(*shape: int, device: str, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device, dtype)


def assert_alone_as_among_others(
    compute: Callable[[int], torch.Tensor | tuple[torch.Tensor, ...]], sizes: list[int]
) -> None:
    """`compute` gives the results of the first T rows, which must be the same bits for all T."""
    whole = compute(sizes[-1])
    for size in sizes[:-1]:
        part = compute(size)
        pairs = [(part, whole)] if isinstance(part, torch.Tensor) else zip(part, whole, strict=True)
        for some, every in pairs:
            assert torch.equal(some, every[:size]), f"rows of {size} differ"


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize(("size_out", "size_in"), [(64, 1536), (80, 272), (33, 100), (1, 64)])
def test_rows_of_a_product_do_not_depend_on_others(
    size_out: int, size_in: int, dtype: torch.dtype, kernels: Kernels, kernel_device: str
) -> None:
    options = dict(device=kernel_device, dtype=dtype)
    weight, x = random(size_out, size_in, **options), random(140, size_in, seed=1, **options)
    operand = kernels.arrange_plain(weight)
    assert kernels.plain_of(operand) is weight
    for bias in (None, random(size_out, seed=2, **options)):

        def product(rows: int, bias: torch.Tensor | None = bias) -> torch.Tensor:
            return kernels.arranged_linear(x[:rows].contiguous(), operand, bias)

        assert_alone_as_among_others(product, [1, 7, 16, 17, 33, 65, 140])
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        error = (product(140).double() - expected).abs().max() / expected.abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 2**-7)


def test_the_library_is_not_trusted_with_few_outputs() -> None:
    """Rounded results of another order are mostly equal: those of a gate's only output might be."""
    from nanovllm.kernels.triton.ordered.linear import COMPARED, comparable

    assert comparable((1, 2048), BF16) == []
    assert comparable((64, 2048), BF16) == [rows for rows in COMPARED if rows >= 2048]
    assert comparable((1024, 1024), BF16) == list(COMPARED)
    assert 16384 not in comparable((151_936, 1024), BF16)


def test_the_library_computes_pieces_of_sizes_that_agree(kernel_device: str) -> None:
    """Any pieces: they are computed in turn, and the kernel computes the rows that are left."""
    pytest.importorskip("triton")
    from nanovllm.kernels.triton.ordered.linear import OrderedWeight, ordered_linear, pieces_of

    assert pieces_of(700, (512, 256)) == [512]
    assert pieces_of(1100, (512, 256)) == [512, 512]
    assert pieces_of(255, (512, 256)) == []
    assert pieces_of(300, ()) == []
    weight, bias = random(48, 64, device=kernel_device), random(48, device=kernel_device, seed=2)
    for rows in (8, 15, 16, 31, 50):
        x = random(rows, 64, device=kernel_device, seed=3)
        for added in (None, bias):
            agreed = OrderedWeight(weight, (16, 8), added is not None)
            out = ordered_linear(x, agreed, added)
            alone = ordered_linear(x, OrderedWeight(weight), added)
            assert torch.allclose(out.float(), alone.float(), rtol=2**-6, atol=2**-6)
            assert torch.equal(out[rows // 8 * 8 :], alone[rows // 8 * 8 :])


@pytest.mark.parametrize("bias", [False, True])
def test_the_library_is_compared_once_as_the_layer_calls_it(
    bias: bool, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanovllm.kernels.triton.ordered import linear

    compared = []

    def agreeing(*given: Any) -> tuple[int, ...]:
        compared.append(given[-1])
        return ()

    monkeypatch.setattr(linear, "agreeing", agreeing)
    layer = ReplicatedLinear(64, 48, bias)
    layer.bind(Backend(cast(Any, None), kernels))
    assert compared == [bias]


@pytest.mark.cuda
@pytest.mark.parametrize(("size_out", "size_in"), [(1024, 3072), (6144, 1024), (4096, 12_288)])
def test_sizes_that_agree_are_found(size_out: int, size_in: int) -> None:
    from nanovllm.kernels.triton.ordered.linear import COMPARED, agreeing, ordered_linear

    kernels = triton_kernels(one_order=True)
    agreed = agreeing((size_out, size_in), BF16, torch.device("cuda"), False)
    assert len(agreed) > len(COMPARED) // 2
    operand = kernels.arrange_plain(random(size_out, size_in, device="cuda"))
    x = random(5000, size_in, device="cuda", seed=1)
    sizes = [1, 16, 100, 255, 256, 257, 511, 700, 1024, 2049, 5000]
    assert_alone_as_among_others(lambda rows: ordered_linear(x[:rows], operand, None), sizes)


QUANTIZED = [
    Format("e4m3"), Format("int8"), Format("e4m3", (128, 128)),
    Format("int4", (1, 128), scales=torch.bfloat16), Format("int4", (5, 20), zeros=True),
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", QUANTIZED, ids=lambda form: f"{form.kind} {form.block}")
def test_rows_of_a_quantized_product_do_not_depend_on_others(
    form: Format, dtype: torch.dtype, kernels: Kernels, kernel_device: str
) -> None:
    """In 16 bits, most sums in another order are equal."""
    operand = kernels.arrange(quantized(64, 2560, form, kernel_device))
    x = random(600, 2560, device=kernel_device, dtype=dtype)

    def product(rows: int) -> torch.Tensor:
        return kernels.arranged_linear(x[:rows], operand, None)

    assert_alone_as_among_others(product, [1, 16, 33, 70, 130 if x.device.type == "cpu" else 600])


@pytest.mark.parametrize(
    ("in_float32", "dtype"), [(False, BF16), (True, BF16), (False, torch.float16)]
)
def test_rows_of_experts_do_not_depend_on_others(
    in_float32: bool, dtype: torch.dtype, kernels: Kernels, kernel_device: str
) -> None:
    """From few pairs of an expert to many, for which kernels and tiles change."""
    hidden, inner, num_experts = 256, 128, 4
    options = dict(device=kernel_device, dtype=dtype)
    gate_up = random(num_experts, 2 * inner, hidden, **options) * 0.2
    down = random(num_experts, hidden, inner, seed=1, **options) * 0.2
    weight = random(num_experts, hidden, device=kernel_device, dtype=torch.float32, seed=2)
    weight = weight if in_float32 else weight.to(dtype)
    router = kernels.router(weight, dtype, Routing(per_token=2, normalized=True), None, None)
    assert router is not None
    x = random(600 if in_float32 else 200, hidden, seed=3, **options)

    def out(rows: int) -> tuple[torch.Tensor, ...]:
        some = x[:rows].contiguous()
        shares, ids = router.route(some)
        return shares, ids, kernels.experts(some, gate_up, down, ids, shares, num_experts)

    sizes = [1, 17, 600] if in_float32 else [1, 2, 9, 40, 130, 200]
    assert_alone_as_among_others(out, sizes if dtype == BF16 else [1, 40, 200])


@pytest.mark.filterwarnings("ignore:(overflow|invalid)")  # of rows that no expert here has
def test_rows_of_whole_experts_of_a_rank_do_not_depend_on_others(
    kernels: Kernels, kernel_device: str
) -> None:
    """Pairs of a row may have experts on another rank, before or after this one's."""
    gate_up = random(2, 256, 256, device=kernel_device) * 0.2
    down = random(2, 256, 128, device=kernel_device, seed=1) * 0.2
    x = random(140, 256, device=kernel_device, seed=3)
    chosen = [torch.randperm(6, generator=torch.Generator().manual_seed(i))[:3] for i in range(140)]
    ids = torch.stack(chosen).int().to(kernel_device) - 2
    shares = random(140, 3, device=kernel_device, dtype=torch.float32, seed=4).abs()

    def out(rows: int) -> torch.Tensor:
        return kernels.experts(x[:rows], gate_up, down, ids[:rows], shares[:rows], 6)

    assert_alone_as_among_others(out, [1, 2, 17, 140])
    elsewhere = ((ids < 0) | (ids > 1)).all(1)
    assert elsewhere.any() and not out(140)[elsewhere].any() and out(140).any()


def test_rows_with_adapters_do_not_depend_on_others(
    kernels: Kernels, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more rows, the inputs of `lora_down` would be divided into fewer parts."""
    pytest.importorskip("triton")
    from nanovllm.kernels.triton.lora import lora

    monkeypatch.setattr(lora, "PARTS", {16: 4, 32: 2})
    shape = Shape(70, size_in=4100, sizes=(40,), max_rank=8)
    inputs = make(shape).to(kernel_device)

    def out(rows: int) -> torch.Tensor:
        part = replace(
            inputs, x=inputs.x[:rows], ids=inputs.ids[:rows], out=inputs.out[:rows].clone()
        )
        return compute(kernels, part)

    assert_alone_as_among_others(out, [1, 20, 70])


def test_heads_of_a_token_do_not_depend_on_others(kernels: Kernels, kernel_device: str) -> None:
    qkv = random(130, 12, 64, device=kernel_device)
    norms = (random(64, device=kernel_device, seed=1), random(64, device=kernel_device, seed=2))
    angles = random(130, 1, 32, device=kernel_device, dtype=torch.float32, seed=3)
    nowhere = torch.empty(0, device=kernel_device)
    slots = torch.full((130,), -1, device=kernel_device)

    def heads(tokens: int) -> tuple[torch.Tensor, ...]:
        rope = angles[:tokens].cos(), angles[:tokens].sin()
        kv = KVLayer(nowhere, nowhere, 1.0)
        return kernels.norm_rope_store(qkv[:tokens], 2, rope, norms, 1e-6, kv, slots[:tokens])

    assert_alone_as_among_others(heads, [1, 128, 130])


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(("size_in", "size_out"), [(128, 40), (100, 128)])
def test_rows_of_products_of_heads_do_not_depend_on_others(
    size_in: int, size_out: int, dtype: torch.dtype, kernels: Kernels, kernel_device: str
) -> None:
    """Of rows that are parts of longer ones, to new rows and to parts of rows."""
    options = dict(device=kernel_device, dtype=dtype)
    x = random(140, 3, size_in + 5, **options)[..., 5:]
    weights = random(3, size_in, size_out, seed=1, **options)
    wide = torch.full((140, 3, size_out + 7), torch.nan, **options)

    def product(rows: int) -> tuple[torch.Tensor, ...]:
        given = kernels.heads_linear(x[:rows], weights, wide[:rows, :, 7:])
        assert wide[..., :7].isnan().all()
        return kernels.heads_linear(x[:rows], weights), given.clone()

    assert_alone_as_among_others(product, [1, 16, 17, 70, 140])
    expected = torch.einsum("thk,hkn->thn", x.double(), weights.double())
    for found in product(140):
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 2**-7)


@pytest.mark.parametrize("size", [1, 100, 2048])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_sums_of_a_row_do_not_depend_on_others(
    dtype: torch.dtype, size: int, kernels: Kernels, kernel_device: str
) -> None:
    """Rows may be parts of longer ones."""
    x = random(40, size + 3, device=kernel_device, dtype=dtype).abs()[:, :size]
    assert_alone_as_among_others(lambda rows: kernels.row_sums(x[:rows]), [0, 1, 2, 33, 40])
    torch.testing.assert_close(kernels.row_sums(x), PLAIN.row_sums(x), rtol=1e-5, atol=1e-6)


def test_norms_over_the_heads_of_all_ranks_read_one_row_at_a_time(
    kernels: Kernels, kernel_device: str
) -> None:
    class OneOfTwo(Ranks):
        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    norm = FullWidthNorm(Build(OneOfTwo(0, 2), PLAIN_FORMATS, 64), 8, 64, 1e-6)
    added = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        added.append(len(x))
        return kernels.row_sums(x)

    norm.to(kernel_device).kernels = changed(kernels, row_sums=counted)
    x = random(40, 4, 64, device=kernel_device)
    assert_alone_as_among_others(lambda rows: norm(x[:rows]), [1, 2, 33, 40])
    assert added == [40, 1, 2, 33]  # PyTorch's sums do not depend on others on a CPU
    wide = x.double()
    expected = wide * (wide.square().mean((1, 2), keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("vocab_size", [32, 33, 50_257])
def test_log_probabilities_do_not_depend_on_the_place_of_a_row(
    vocab_size: int, kernel_device: str
) -> None:
    logits = random(9, vocab_size, device=kernel_device, dtype=torch.float32)
    together = log_probabilities(logits)
    assert together.shape == logits.shape
    assert torch.allclose(together, logits.double().log_softmax(1).float(), atol=1e-5)
    for row in range(9):
        assert torch.equal(
            log_probabilities(logits[row : row + 1].clone()), together[row : row + 1]
        )
