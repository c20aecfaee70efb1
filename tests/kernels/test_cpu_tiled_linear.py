"""The CPU's linear layers against their twins, and against float64."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from conftest import PRODUCTS
from cpu_builds import compiled_with

from nanovllm.kernels.cpu import library
from nanovllm.kernels.cpu.table import cpu_kernels
from nanovllm.kernels.cpu.tiled_linear import arrange, arrange_plain, tiled_linear
from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix
from nanovllm.kernels.plain import quantized_linear as plain
from nanovllm.kernels.table import PLAIN

pytestmark = [pytest.mark.usefixtures("compiler"), pytest.mark.usefixtures("one_thread")]

DTYPES = [torch.float32, torch.bfloat16]
ROWS = (1, 2, 3, 4, 5, 6, 7, 10, 16, 300)  # each number of rows that is computed together
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
SUM_ERROR = 2.0**-21  # of the sum of all products' sizes, for sums in any order
BUILDS = {"no AMX": ("-mno-amx-bf16",), "no AVX-512": ("-mno-avx512f",)}


@dataclass(frozen=True)
class Format:
    """A random quantized matrix; an output or input block of None is the whole side."""

    kind: str
    shape: tuple[int, int]
    block: tuple[int | None, int | None]
    zeros: bool = False
    order: bool = False
    scales: torch.dtype = torch.float32

    def make(self) -> QuantizedMatrix:
        torch.manual_seed(0)
        size_out, size_in = self.shape
        block = (self.block[0] or size_out, self.block[1] or size_in)
        blocks = (-(-size_out // block[0]), -(-size_in // block[1]))
        limit = 8 if self.kind == "int4" else 128
        if self.kind == "e4m3":
            codes = (torch.randn(self.shape) * 0.1).to(torch.float8_e4m3fn)  # some are subnormal
        else:
            codes = torch.randint(-limit, limit, self.shape, dtype=torch.int8)
        return QuantizedMatrix(
            codes=codes,
            scales=(torch.rand(blocks) + 0.1).to(self.scales),
            zeros=torch.randint(-limit, limit, blocks, dtype=torch.int8) if self.zeros else None,
            block=block,
            bits=4 if self.kind == "int4" else 8,
            order=torch.randperm(size_in) if self.order else None,
        )


FORMATS = [
    Format("int8", (128, 256), (1, None)),
    Format("int8", (96, 512), (1, 128), zeros=True),
    Format("int8", (70, 1000), (1, None), zeros=True),
    Format("int8", (67, 333), (3, 33), zeros=True, order=True),
    Format("int4", (128, 512), (1, 128)),
    Format("int4", (128, 512), (1, 128), zeros=True, scales=torch.float16),
    Format("int4", (100, 192), (1, 32), scales=torch.bfloat16),
    Format("int4", (100, 320), (1, 64), zeros=True, order=True),
    Format("int4", (65, 300), (1, 128), zeros=True),
    Format("int4", (3, 500), (1, 200)),
    Format("int4", (1, 1), (1, 1), zeros=True),
    Format("e4m3", (128, 256), (1, None)),
    Format("e4m3", (100, 130), (None, None), scales=torch.bfloat16),
    Format("e4m3", (200, 300), (128, 128)),
    Format("e4m3", (33, 77), (5, 7), order=True),
]


@pytest.fixture(
    scope="module",
    params=["native", *(pytest.param(name, marks=pytest.mark.slow) for name in BUILDS)],
)
def build(request: pytest.FixtureRequest, compiler: None) -> Iterator[None]:
    """Compiled for this processor, and as for one with less."""
    with compiled_with(*BUILDS.get(request.param, ())):
        if request.param != "native":
            assert not library.constant("unit_size"), "the build has AMX"
        if request.param == "no AVX-512" and library.constant("lanes") > 8:
            pytest.fail("the build has AVX-512's vectors")
        yield


def exact(
    x: torch.Tensor, weight: QuantizedMatrix, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product, summed in float64, and a bound for the error of sums in float32.

    A zero point may be subtracted from the sum, instead of from each code.
    """
    x = (x if weight.order is None else x[:, weight.order]).double()
    out = x @ plain.dequantize(weight).double().T + bias.double()
    sizes = plain.dequantize(replace(weight, zeros=None)).abs()
    if weight.zeros is not None:
        sizes += plain.dequantize(replace(weight, codes=torch.zeros_like(weight.codes))).abs()
    return out, SUM_ERROR * (x.abs() @ sizes.double().T + bias.double().abs())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_a_product_has_float32_sums_and_is_rounded_once(
    form: Format, dtype: torch.dtype, build: None
) -> None:
    weight = form.make()
    arranged = arrange(weight)
    for num_rows in ROWS:
        x = torch.randn(num_rows, form.shape[1] + 3).to(dtype)[:, 3:]
        bias = torch.randn(form.shape[0]).to(dtype)
        before = x.clone()
        out = tiled_linear(x, arranged, bias)
        expected, bound = exact(x, weight, bias)
        rounding = 0.0 if dtype == torch.float32 else 2.0**-8
        assert out.dtype == dtype and out.shape == expected.shape and out.is_contiguous()
        error = (out.double() - expected).abs() - rounding * expected.abs()
        assert bool((error <= bound).all()), f"{num_rows} rows: {float((error / bound).max())}"
        assert torch.equal(x, before), "the input was changed"


@pytest.mark.parametrize("form", FORMATS)
def test_float32_equals_the_twin(form: Format, build: None) -> None:
    weight = form.make()
    x = torch.randn(5, form.shape[1])
    expected = plain.quantized_linear(x, weight)
    _, bound = exact(x, weight, torch.zeros(form.shape[0]))
    out = tiled_linear(x, arrange(weight))
    assert bool(((out - expected).abs() <= 2 * bound).all())


PLAIN_SHAPES = [(128, 256), (70, 1000), (64, 8), (3, 500), (1, 1), (200, 136)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", PLAIN_SHAPES)
def test_plain_weights_have_float32_sums_and_are_rounded_once(
    shape: tuple[int, int], dtype: torch.dtype, build: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    PRODUCTS["tiled"].use(monkeypatch)
    torch.manual_seed(0)
    weight = torch.randn(shape[0], 2 * shape[1]).to(dtype)[:, : shape[1]]  # not contiguous
    bias = torch.randn(shape[0]).to(dtype)
    arranged = arrange_plain(weight)
    assert arranged is not None
    many = tiled_linear(x := torch.randn(300, shape[1]).to(dtype), arranged, bias)
    expected = x.double() @ weight.double().T + bias.double()
    bound = SUM_ERROR * (x.abs().double() @ weight.abs().double().T + bias.double().abs())
    rounding = 0.0 if dtype == torch.float32 else 2.0**-8
    assert many.dtype == dtype
    assert bool(((many.double() - expected).abs() <= bound + rounding * expected.abs()).all())
    for num_rows in ROWS:
        assert torch.equal(tiled_linear(x[:num_rows], arranged, bias), many[:num_rows])


def test_plain_weights_are_left_to_onednn_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.ones(64, 64)
    PRODUCTS["packed"].use(monkeypatch)
    assert arrange_plain(weight) is None
    PRODUCTS["tiled"].use(monkeypatch)
    assert arrange_plain(weight) is not None
    assert arrange_plain(weight.half()) is None


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize(
    ("bits", "codes"),
    [
        (8, torch.arange(-128, 128, dtype=torch.int8)),
        (4, torch.arange(-8, 8, dtype=torch.int8)),
        (8, E4M3[~E4M3.isnan()]),
    ],
)
def test_each_code_is_decoded_exactly(
    bits: int, codes: torch.Tensor, flush: bool, build: None
) -> None:
    """Also where the processor takes float32's subnormal numbers as 0: e4m3's are larger."""
    turned = codes.repeat(2).unfold(0, len(codes), 1)[:5]  # a code is at several places of a word
    arranged = arrange(
        QuantizedMatrix(turned.contiguous(), torch.full((5, 1), 0.5), None, (1, len(codes)), bits)
    )
    x = torch.eye(len(codes))
    torch.set_flush_denormal(flush)
    try:
        many = tiled_linear(x, arranged)
        one_by_one = torch.cat([tiled_linear(row[None], arranged) for row in x])
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(many, turned.float().T * 0.5)
    assert torch.equal(one_by_one, many)


def test_a_code_that_is_nan_makes_its_output_nan(build: None) -> None:
    weight = Format("e4m3", (70, 300), (128, 128)).make()
    weight.codes.view(torch.uint8)[5, 299] = 0x7F
    weight.codes.view(torch.uint8)[66, 0] = 0xFF
    x = torch.randn(3, 300)
    out = tiled_linear(x, arrange(weight))
    assert torch.equal(out.isnan(), plain.quantized_linear(x, weight).isnan())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [form for form in FORMATS if form.shape[0] > 60])
def test_a_row_is_the_same_in_any_batch(form: Format, dtype: torch.dtype, build: None) -> None:
    arranged = arrange(form.make())
    x = torch.randn(300, form.shape[1]).to(dtype)
    expected = tiled_linear(x, arranged)
    for num_rows in ROWS:
        assert torch.equal(tiled_linear(x[:num_rows], arranged), expected[:num_rows])
        assert torch.equal(tiled_linear(x[-num_rows:], arranged), expected[-num_rows:])


def test_a_result_is_the_same_on_any_number_of_threads() -> None:
    form = Format("int4", (1000, 512), (1, 128), zeros=True)
    arranged = arrange(form.make())
    for num_rows in (1, 40, 300):
        x = torch.randn(num_rows, 512)
        outs = []
        before = torch.get_num_threads()
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outs.append(tiled_linear(x, arranged))
        torch.set_num_threads(before)
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize(("kind", "size"), [("int4", 0.5), ("int8", 1.0), ("e4m3", 1.0)])
def test_a_weight_takes_its_bits(kind: str, size: float) -> None:
    arranged = arrange(Format(kind, (640, 512), (1, 128)).make())
    assert arranged.codes.nbytes == 640 * 512 * size
    assert arranged.order is None


def test_no_rows_give_no_outputs() -> None:
    arranged = arrange(FORMATS[0].make())
    assert tiled_linear(torch.empty(0, 256), arranged).shape == (0, 128)


def test_the_table_has_both() -> None:
    weight = Format("int4", (64, 128), (1, 32), zeros=True).make()
    assert PLAIN.arrange(weight) is weight
    kernels = cpu_kernels()
    x = torch.randn(2, 128)
    expected = PLAIN.arranged_linear(x, weight, None)
    out = kernels.arranged_linear(x, kernels.arrange(weight), None)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-3)
