"""The CPU's products with weights of 8 bits in bfloat16 models, against float64."""

import mmap
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cpu_builds import AVX2, compiled_with

from nanovllm.formats import choice
from nanovllm.formats.scheme import INT8
from nanovllm.formats.stored import RankPart
from nanovllm.kernels.cpu import processor
from nanovllm.kernels.cpu.arranged import arrange
from nanovllm.kernels.cpu.byte_linear import TiledBytes
from nanovllm.kernels.cpu.huge_pages import HUGE
from nanovllm.kernels.cpu.tiled_linear import TiledMatrix, plain_of, tiled_linear
from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix
from nanovllm.kernels.plain import quantized_linear as plain

pytestmark = [pytest.mark.usefixtures("compiler"), pytest.mark.usefixtures("one_thread")]

HALF_UNIT = 2.0**-8  # the relative error of a number that is rounded to bfloat16
INPUT_ERROR = 2.0**-13  # of the largest of 256 inputs
SUM_ERROR = 2.0**-20  # of the sum of all products' sizes


@pytest.fixture(scope="module", params=["native", pytest.param("AVX2", marks=pytest.mark.slow)])
def build(request: pytest.FixtureRequest, compiler: None) -> Iterator[None]:
    """Compiled for this processor, and as for one that has AVX2 only."""
    with compiled_with(*(AVX2 if request.param == "AVX2" else ())):
        yield


@pytest.fixture(autouse=True)
def multiplies_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "multiplies_bytes", lambda: True)


def matrix(size_out: int, size_in: int) -> QuantizedMatrix:
    torch.manual_seed(size_in)
    codes = torch.randint(-128, 128, (size_out, size_in), dtype=torch.int8)
    scales = (torch.rand(size_out, 1) + 0.1) / 64
    return QuantizedMatrix(codes, scales, None, (1, size_in), 8, input_dtype=torch.bfloat16)


def bytes_of(weight: QuantizedMatrix) -> TiledBytes:
    arranged = arrange(weight)
    assert isinstance(arranged, TiledBytes)
    return arranged


@pytest.mark.parametrize("shape", [(1, 64), (37, 576), (48, 256), (80, 832)])
def test_products_lose_almost_nothing(shape: tuple[int, int], build: None) -> None:
    """Fails if a code or an input is at another place, has only 8 bits, or sums overflow."""
    weight, bias = matrix(*shape), torch.randn(shape[0]).bfloat16()
    tiled, values = bytes_of(weight), plain.dequantize(weight).double()
    assert torch.equal(tiled.values().double(), values)
    for num_rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 40, 600 if shape[0] == 48 else 70):
        x = torch.randn(num_rows, shape[1] + 3).bfloat16()[:, 3:]
        x[-1] = -3.984375  # the largest integer, of 8 bits that are all 1
        out = tiled_linear(x, tiled, bias)
        expected = x.double() @ values.T + bias.double()
        largest = x.double().abs().amax(1, keepdim=True)
        bound = INPUT_ERROR * largest @ values.abs().sum(1)[None]
        bound += SUM_ERROR * (x.double().abs() @ values.abs().T)
        error = (out.double() - expected).abs() - HALF_UNIT * expected.abs()
        assert out.dtype == torch.bfloat16 and bool((error <= bound).all()), num_rows


def test_a_row_does_not_depend_on_the_others(build: None) -> None:
    """Fails if sums are added in another order for some numbers of rows, or rows are mixed."""
    weight = bytes_of(matrix(80, 832))
    x = torch.randn(101, 832).bfloat16()
    alone = torch.cat([tiled_linear(row[None], weight) for row in x])
    for num_rows in (2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 101):
        for start in {0, 101 - num_rows}:
            rows = slice(start, start + num_rows)
            assert torch.equal(tiled_linear(x[rows], weight), alone[rows]), num_rows
    torch.set_num_threads(2)
    many = tiled_linear(x, weight)
    torch.set_num_threads(1)
    assert torch.equal(many, alone)


@pytest.mark.parametrize("num_rows", [1, 20])
def test_inputs_of_any_size(num_rows: int, build: None) -> None:
    """Fails if a span's scale overflows, or a row that is not finite changes another."""
    weight = matrix(20, 320)
    tiled, values = bytes_of(weight), plain.dequantize(weight).double()
    x = torch.randn(num_rows, 320).bfloat16()
    for factor in (0.0, 1e-38, 1e-30, 1e30):
        large = (x.double() * factor).bfloat16()
        error = (tiled_linear(large, tiled).double() - large.double() @ values.T).abs()
        bound = 2 * HALF_UNIT * (large.double().abs() @ values.abs().T) + 1e-35
        assert bool((error <= bound).all()), factor
    for bad in (torch.inf, torch.nan):
        before = tiled_linear(x, tiled)
        x[0, 50] = bad
        after = tiled_linear(x, tiled)
        assert not after[0].isfinite().any() and torch.equal(after[1:], before[1:])


def test_other_weights_and_float32_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if weights that do not fit are arranged all the same, or other inputs are rounded."""
    weight = matrix(20, 192)
    assert plain_of(bytes_of(weight)) is None
    x = torch.randn(3, 192)
    expected = x @ plain.dequantize(weight).T
    found = tiled_linear(x, bytes_of(weight))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(tiled_linear(x[1:2], bytes_of(weight)), found[1:2])
    for other in (
        replace(weight, input_dtype=torch.float32),
        replace(weight, zeros=torch.ones(20, 1, dtype=torch.int8)),
        replace(weight, order=torch.arange(192)),
        replace(weight, block=(1, 64), scales=torch.ones(20, 3)),
        matrix(20, 200),
    ):
        assert isinstance(arrange(other), TiledMatrix)
    monkeypatch.setattr(processor, "multiplies_bytes", lambda: False)
    assert isinstance(arrange(weight), TiledMatrix)


def test_large_weights_begin_with_a_huge_page() -> None:
    tiled = bytes_of(matrix(2304, 1024))
    assert tiled.codes.data_ptr() % HUGE == 0 or not hasattr(mmap, "MADV_HUGEPAGE")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_models_of_bfloat16_multiply_bytes(dtype: torch.dtype) -> None:
    """Fails if the format forgets the model's type: products would be half as fast."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        made = choice.format_of(INT8)
    finally:
        torch.set_default_dtype(before)
    part = RankPart.whole(20, 128)
    plain_weight = torch.randn(20, 128)
    tensors = {}
    for name, tensor in made.of_plain(plain_weight).items():
        stored = made.tensors[name]
        tensors[name] = part.new(stored).data
        part.load(stored, tensors[name], tensor, None)
    weight = made.weight(tensors, part)
    assert isinstance(weight, QuantizedMatrix)
    assert isinstance(arrange(weight), TiledBytes if dtype == torch.bfloat16 else TiledMatrix)
