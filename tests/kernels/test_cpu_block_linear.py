"""The CPU's products with weights in GGUF's blocks against their twin, and against float64."""

import ctypes
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from blocks import random_blocks

from nanovllm.kernels.cpu import library
from nanovllm.kernels.cpu.block_linear import (
    KINDS,
    MOST_ROUNDED,
    arrange_blocks,
    block_linear,
    block_rows,
)
from nanovllm.kernels.cpu.compile import load
from nanovllm.kernels.cpu.table import cpu_kernels
from nanovllm.kernels.operands.block_matrix import BlockMatrix
from nanovllm.kernels.operands.block_types import BLOCK_TYPES
from nanovllm.kernels.plain import block_linear as plain
from nanovllm.kernels.plain.block_rows import block_rows as plain_rows
from nanovllm.kernels.table import PLAIN

pytestmark = [pytest.mark.usefixtures("compiler"), pytest.mark.usefixtures("one_thread")]

SUM_ERROR = 2.0**-20  # of the sum of all products' sizes, for sums in float32
INPUT_ERROR = 2.0**-13  # of the largest of 32 inputs, for rounded inputs
HALF_UNIT = 2.0**-8  # the relative error of a number that is rounded to bfloat16
# Without AVX-512 and VNNI; not optimized, so that it is compiled in a few seconds.
OTHER_BUILD = ("-mno-avx512f", "-mno-avxvnni", "-O1")


@pytest.fixture(scope="module", params=["native", pytest.param("AVX2", marks=pytest.mark.slow)])
def build(request: pytest.FixtureRequest, compiler: None) -> Iterator[None]:
    """Compiled for this processor, and as for one that has AVX2 only."""
    if request.param == "native":
        yield
        return
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("AVX2 is x86's")

    def other(source: Path = library.SOURCE) -> ctypes.CDLL:
        return load(source, (*library.DEFINITIONS, *OTHER_BUILD))

    caches = (library.function, library.constant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "library", other)
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()


def values_of(weight: BlockMatrix) -> torch.Tensor:
    return plain.dequantize(weight.codes, weight.kind).flatten(1)


def inputs_for(size: int) -> list[int]:
    """Numbers of inputs that fill several parts of a kernel, and a part of one."""
    return [32, 32 * 9] if size == 32 else [256, 768]


def product(
    x: torch.Tensor, weight: BlockMatrix, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64, and the sum of all products' sizes."""
    values, x = values_of(weight).double(), x.double()
    out, sizes = x @ values.T, x.abs() @ values.abs().T
    if bias is None:
        return out, sizes
    return out + bias.double(), sizes + bias.double().abs()


def errors_of_inputs(x: torch.Tensor, weight: BlockMatrix) -> torch.Tensor:
    """The effect of inputs that are rounded to a part of the largest of 32."""
    largest = x.double().unflatten(1, (-1, 32)).abs().amax(2)
    sizes = values_of(weight).double().abs().unflatten(1, (-1, 32)).sum(2)
    return INPUT_ERROR * largest @ sizes.T


@pytest.mark.parametrize("name", KINDS)
def test_float32_is_multiplied_in_float32(name: str, build: None) -> None:
    """Fails if a code, a scale or an input is at another place, or is rounded."""
    for size_out, size_in in zip((1, 37), inputs_for(BLOCK_TYPES[name].size), strict=True):
        weight = random_blocks(name, size_out, size_in)
        tiled, bias = arrange_blocks(weight), torch.randn(size_out)
        for num_rows in (1, 2, 3, 7, 12, 40):
            x = torch.randn(num_rows, size_in + 3)[:, 3:]
            out = block_linear(x, tiled, bias)
            expected, sizes = product(x, weight, bias)
            assert bool(((out - expected).abs() <= SUM_ERROR * sizes).all()), (size_in, num_rows)
            twin = plain.block_linear(x, weight, bias)
            assert bool(((out - twin).abs() <= 1e-5 * sizes).all())


@pytest.mark.parametrize("name", KINDS)
def test_few_rows_of_bfloat16_lose_almost_nothing(name: str, build: None) -> None:
    """Fails if inputs have only 8 bits, sums of bytes overflow, or a zero point is forgotten."""
    for size_out, size_in in zip((1, 37), inputs_for(BLOCK_TYPES[name].size), strict=True):
        weight = random_blocks(name, size_out, size_in)
        tiled, bias = arrange_blocks(weight), torch.randn(size_out).bfloat16()
        for num_rows in (1, 2, 3, MOST_ROUNDED):
            x = torch.randn(num_rows, size_in + 3).bfloat16()[:, 3:]
            x[0, :8] = 3.0  # the largest codes of a type, times equal inputs
            out = block_linear(x, tiled, bias)
            expected, sizes = product(x, weight, bias)
            bound = SUM_ERROR * sizes + errors_of_inputs(x, weight)
            error = (out.double() - expected).abs() - HALF_UNIT * expected.abs()
            assert out.dtype == torch.bfloat16 and bool((error <= bound).all()), num_rows


@pytest.mark.parametrize("name", KINDS)
def test_many_rows_of_bfloat16_round_at_most_the_weights(name: str, build: None) -> None:
    for size_out, size_in in zip((16, 37), inputs_for(BLOCK_TYPES[name].size), strict=True):
        weight = random_blocks(name, size_out, size_in)
        tiled, bias = arrange_blocks(weight), torch.randn(size_out).bfloat16()
        for num_rows in (MOST_ROUNDED + 1, 17, 40, 300):
            x = torch.randn(num_rows, size_in + 3).bfloat16()[:, 3:]
            out = block_linear(x, tiled, bias)
            expected, sizes = product(x, weight, bias)
            error = (out.double() - expected).abs() - HALF_UNIT * expected.abs()
            assert bool((error <= HALF_UNIT * sizes).all()), num_rows
            typical = (out.double() - expected).norm() / expected.norm()
            assert typical < 2.0**-8, "more than the rounding of weights and outputs"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_a_row_does_not_depend_on_the_others(name: str, dtype: torch.dtype, build: None) -> None:
    """Fails if sums are divided among rows, or a partial group of rows is computed otherwise."""
    weight = arrange_blocks(random_blocks(name, 80, 1024))
    x = torch.randn(300, 1024).to(dtype)
    few = block_linear(x[:MOST_ROUNDED], weight)
    for num_rows in range(1, MOST_ROUNDED):
        assert torch.equal(block_linear(x[:num_rows], weight), few[:num_rows])
    many = block_linear(x, weight)
    for start, stop in ((0, 11), (40, 57), (100, 132), (250, 283)):
        assert torch.equal(block_linear(x[start:stop], weight), many[start:stop])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_nothing(dtype: torch.dtype, build: None) -> None:
    weight = random_blocks("Q5_K", 333, 1024)
    x, ids = torch.randn(40, 1024).to(dtype), torch.randint(333, (40,))
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        tiled = arrange_blocks(weight)
        results.append((block_linear(x[:9], tiled), block_linear(x, tiled),
                        block_rows(tiled, ids, dtype)))  # fmt: skip
    torch.set_num_threads(1)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_embeddings_are_exact(name: str, build: None) -> None:
    """Fails if a value differs from the twin's by a bit."""
    weight = random_blocks(name, 37, 768)
    if name == "MXFP4":
        weight.codes[:, :3, 0] = torch.tensor([0, 1, 2])  # the smallest scales
    ids = torch.tensor([36, 0, 17, 17, 5])
    for dtype in (torch.float32, torch.bfloat16):
        rows = block_rows(arrange_blocks(weight), ids, dtype)
        assert torch.equal(rows, plain_rows(weight, ids, dtype))


@pytest.mark.parametrize("num_rows", [1, 40])
def test_inputs_of_any_size(num_rows: int, build: None) -> None:
    """Fails if a unit's scale overflows, or a row that is not finite changes another."""
    weight = random_blocks("Q8_0", 20, 96)
    tiled = arrange_blocks(weight)
    x = torch.randn(num_rows, 96).bfloat16()
    for factor in (0.0, 1e-38, 1e-30, 1e30):
        large = (x.double() * factor).bfloat16()
        large[:, :32] = 0
        expected, sizes = product(large, weight, None)
        error = (block_linear(large, tiled).double() - expected).abs()
        assert bool((error <= 2 * HALF_UNIT * sizes + 1e-36).all()), factor
    for bad in (torch.inf, torch.nan):
        before = block_linear(x, tiled)
        x[0, 50] = bad
        after = block_linear(x, tiled)
        assert not after[0].isfinite().any() and torch.equal(after[1:], before[1:])


def test_a_weight_takes_the_memory_of_the_file() -> None:
    for name in KINDS:
        weight = random_blocks(name, 64, 768)
        tiled = arrange_blocks(weight)
        assert tiled.codes.numel() + tiled.scales.numel() <= 1.05 * weight.codes.numel(), name


def test_kernels_of_both_sets_have_one_contract() -> None:
    weight = random_blocks("Q4_K", 48, 512)
    x, ids, bias = torch.randn(3, 512), torch.tensor([1, 47]), torch.randn(48)
    of = [
        (kernels.block_linear(x, operand, bias), kernels.block_rows(operand, ids, torch.float32))
        for kernels in (PLAIN, cpu_kernels())
        for operand in [kernels.arrange_blocks(weight)]
    ]
    torch.testing.assert_close(of[0][0], of[1][0], rtol=1e-5, atol=1e-5)
    assert torch.equal(of[0][1], of[1][1])
