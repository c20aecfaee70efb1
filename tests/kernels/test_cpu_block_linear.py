"""The CPU's products with weights in GGUF's blocks against their twin, and against float64."""

import mmap
from collections.abc import Iterator

import pytest
import torch
from blocks import random_blocks
from cpu_builds import AVX2, compiled_with

from nanovllm.kernels.cpu.block_linear import (
    KINDS,
    arrange_blocks,
    block_linear,
    block_rows,
)
from nanovllm.kernels.cpu.huge_pages import HUGE
from nanovllm.kernels.cpu.table import cpu_kernels
from nanovllm.kernels.operands.block_matrix import BlockMatrix
from nanovllm.kernels.operands.block_types import BLOCK_TYPES
from nanovllm.kernels.plain import block_linear as plain
from nanovllm.kernels.plain.block_rows import block_rows as plain_rows
from nanovllm.kernels.table import PLAIN

pytestmark = [pytest.mark.usefixtures("compiler"), pytest.mark.usefixtures("one_thread")]

SUM_ERROR = 2.0**-20  # of the sum of all products' sizes, for sums in float32
# The error of a rounded input, relative to the largest of 32.
INPUT_ERROR = dict.fromkeys(KINDS, 2.0**-13) | dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), 2.0**-11)
INPUT_ERROR["Q3_K"] = 2.0**-12
ROWS = (1, 2, 3, 4, 7, 12, 16, 17, 40)  # each number of rows that is computed together, and more
HALF_UNIT = 2.0**-8  # the relative error of a number that is rounded to bfloat16
# Not optimized, so that they are compiled in a few seconds. "one sum" is what GCC does for Zen 5:
# in loops with one sum, products are rounded before they are added.
BUILDS = {
    "AVX2": AVX2,
    "one sum": (
        "--param=avoid-fma-max-bits=512", "-mno-avx512bw", "-mno-amx-tile", "-mno-amx-int8", "-O1",
        "-fexpensive-optimizations",
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=["native", pytest.param("AVX2", marks=pytest.mark.slow)])
def build(request: pytest.FixtureRequest, compiler: None) -> Iterator[None]:
    """Compiled for this processor, and as for others."""
    with compiled_with(*BUILDS.get(request.param, ())):
        yield


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
    return INPUT_ERROR[weight.kind.name] * largest @ sizes.T


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
def test_rounded_inputs_lose_almost_nothing(name: str, build: None) -> None:
    """Fails if inputs have only 8 bits, sums of bytes overflow, or a zero point is forgotten."""
    for size_out, size_in in zip((1, 37), inputs_for(BLOCK_TYPES[name].size), strict=True):
        weight = random_blocks(name, size_out, size_in)
        tiled, bias = arrange_blocks(weight), torch.randn(size_out).bfloat16()
        for num_rows in ROWS:
            x = torch.randn(num_rows, size_in + 3).bfloat16()[:, 3:]
            x[0, :8] = 3.0  # the largest codes of a type, times equal inputs
            x[-1, 9:20] = -3.984375  # the largest integer, of 8 bits that are all 1
            out = block_linear(x, tiled, bias)
            expected, sizes = product(x, weight, bias)
            bound = SUM_ERROR * sizes + errors_of_inputs(x, weight)
            error = (out.double() - expected).abs() - HALF_UNIT * expected.abs()
            assert out.dtype == torch.bfloat16 and bool((error <= bound).all()), num_rows


@pytest.mark.parametrize("name", KINDS)
def test_a_row_does_not_depend_on_the_others(name: str, build: None) -> None:
    """Fails if sums are added in another order, or by another arithmetic, for some numbers of rows.

    80 outputs are tiles that are read together, and one that is alone.
    """
    weight = arrange_blocks(random_blocks(name, 80, 768))
    x, bias = torch.randn(101, 768).bfloat16(), torch.randn(80).bfloat16()
    alone = torch.cat([block_linear(row[None], weight, bias) for row in x])
    for num_rows in (2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 101):
        for start in {0, 101 - num_rows}:
            rows = slice(start, start + num_rows)
            assert torch.equal(block_linear(x[rows], weight, bias), alone[rows]), num_rows


@pytest.mark.parametrize(
    "build", [pytest.param(name, marks=pytest.mark.slow) for name in ("native", *BUILDS)],
    indirect=True,
)  # fmt: skip
def test_a_float32_row_does_not_depend_on_the_others(build: None) -> None:
    weight = arrange_blocks(random_blocks("Q6_K", 80, 1024))
    x = torch.randn(300, 1024)
    many = block_linear(x, weight)
    for start, stop in ((0, 1), (3, 5), (40, 57), (100, 132), (250, 283)):
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


def test_large_weights_begin_with_a_huge_page() -> None:
    """Fails if the memory has been written before it is asked to have huge pages."""
    tiled = arrange_blocks(random_blocks("Q8_0", 2304, 1024))
    assert tiled.codes.data_ptr() % HUGE == 0 or not hasattr(mmap, "MADV_HUGEPAGE")


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
