"""Plain bfloat16 weights on the CPU: one order of sums for any number of rows, and their memory."""

import ctypes
import gc
import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import PRODUCTS

from nanovllm.kernels.cpu import huge_pages, library, pairs, processor
from nanovllm.kernels.cpu.compile import load
from nanovllm.kernels.cpu.library import constant
from nanovllm.kernels.cpu.processor import cpu_info
from nanovllm.kernels.cpu.products import multiplier
from nanovllm.kernels.cpu.table import cpu_kernels
from nanovllm.kernels.cpu.tiled_linear import (
    OF_PAIRS,
    TiledMatrix,
    arrange_in_one_order,
    arrange_plain,
    plain_of,
    tiled_linear,
)
from nanovllm.kernels.plain import packed_linear

pytestmark = [pytest.mark.usefixtures("compiler"), pytest.mark.usefixtures("one_thread")]

# No rows; those of one register and of two, with a rest; parts; several passes through a weight
ROWS = (0, *range(2, 36), 47, 48, 49, 63, 64, 65, 100, 129, 530)
SHAPES = [(64, 320), (70, 1000), (31, 33), (1, 1), (40, 4096)]
HUGE = 1 << 21
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _ours(monkeypatch: pytest.MonkeyPatch) -> None:
    PRODUCTS["tiled"].use(monkeypatch)


@pytest.fixture(params=["native", pytest.param("vectors", marks=pytest.mark.slow)])
def build(request: pytest.FixtureRequest, compiler: None) -> Iterator[None]:
    """Compiled for this processor, and as for AMD's vectors of bfloat16."""
    if request.param == "native":
        yield
        return
    if "avx512_bf16" not in cpu_info().get("flags", "").split():
        pytest.skip("this processor has no vectors of bfloat16")

    def other(source: Path = library.SOURCE) -> ctypes.CDLL:
        return load(source, (*library.DEFINITIONS, "-mno-amx-bf16"))

    caches = (library.function, library.constant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "library", other)
        patch.setattr(processor, "has_fast_vectors", lambda _: True)
        for cache in caches:
            cache.cache_clear()
        assert library.constant("vector_unit_size")
        assert arranged(torch.ones(8, 8).bfloat16()).kind == "pairs"
        yield
    for cache in caches:
        cache.cache_clear()


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def arranged(weight: torch.Tensor) -> TiledMatrix:
    found = arrange_plain(weight)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_the_same_alone_and_among_others(
    shape: tuple[int, int], dtype: torch.dtype, build: None
) -> None:
    """Fails if sums are divided by the number of rows, or rows share a register with others."""
    torch.manual_seed(0)
    matrix, bias = arranged(torch.randn(shape).to(dtype)), torch.randn(shape[0]).to(dtype)
    x = torch.randn(max(ROWS), shape[1] + 5).to(dtype)[:, 5:]
    alone = torch.cat([tiled_linear(row[None], matrix, bias) for row in x[:100]])
    for count in ROWS:
        few = min(count, 100)
        assert torch.equal(tiled_linear(x[:count], matrix, bias)[:few], alone[:few]), count
        last = tiled_linear(x[100 - few : 100], matrix, bias)
        assert torch.equal(last, alone[100 - few :]), count


@pytest.mark.parametrize("count", [2, 20, 40])
def test_what_the_other_rows_are_changes_nothing(count: int, build: None) -> None:
    """Also if they are infinite or no numbers, and with any number of threads."""
    weight = torch.randn(200, 96).bfloat16()
    matrix, x = arranged(weight), torch.randn(count, 96).bfloat16()
    expected = tiled_linear(x, matrix)
    others = x.clone()
    others[1:] = torch.tensor([torch.nan, torch.inf] * 48)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(tiled_linear(x, matrix), expected)
        assert torch.equal(tiled_linear(others, matrix)[0], expected[0])
    torch.set_num_threads(1)


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_in_float32_and_rounded_once(shape: tuple[int, int], build: None) -> None:
    weight, bias = torch.randn(shape).bfloat16(), torch.randn(shape[0]).bfloat16()
    x = torch.randn(270, shape[1]).bfloat16()
    expected = x.double() @ weight.double().T + bias.double()
    bound = 2.0**-21 * (x.double().abs() @ weight.double().abs().T + bias.double().abs())
    for count in (1, 4, 9, 12, 30, 270):
        out = tiled_linear(x[:count], arranged(weight), bias)
        error = (out.double() - expected[:count]).abs()
        assert bool((error <= bound[:count] + 2.0**-8 * expected[:count].abs()).all()), count


@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_is_restored(shape: tuple[int, int], build: None) -> None:
    weight = torch.randn(shape[0], 2 * shape[1]).bfloat16()[:, : shape[1]]
    restored = plain_of(arranged(weight))
    assert restored is not None and torch.equal(restored, weight) and restored.is_contiguous()


@pytest.mark.parametrize("shape", [(64, 320), (150, 96), (37, 4096)])
def test_a_table_is_multiplied_where_it_is(shape: tuple[int, int]) -> None:
    """With the bits of other weights. Fails if the last outputs or rows are at another place."""
    table = torch.nn.Parameter(torch.randn(shape[0] + 3, shape[1]).bfloat16(), requires_grad=False)
    rows, bias = table[: shape[0]], torch.randn(shape[0]).bfloat16()
    shared, copied = arrange_plain(rows, True), arranged(rows)
    assert shared is not None
    if constant("unit_size"):
        assert shared.codes.data_ptr() == table.data_ptr() and shared.kind == "rows"
    restored = plain_of(shared)
    assert restored is not None and torch.equal(restored, rows)
    x = torch.randn(200, shape[1] + 5).bfloat16()[:, 5:]
    for count in (*range(1, 35), 47, 48, 49, 63, 64, 65, 200):
        for added in (None, bias):
            expected = tiled_linear(x[:count], copied, added)
            assert torch.equal(tiled_linear(x[:count], shared, added), expected), count
    table.data[1] = 2.0
    if shared.kind == "rows":  # it has no values of its own
        again = tiled_linear(x[:3], arranged(table[: shape[0]]))
        assert torch.equal(tiled_linear(x[:3], shared), again)


@pytest.mark.parametrize("is_table", [False, True])
def test_rows_in_float32_are_multiplied_too(is_table: bool, build: None) -> None:
    """AMX has no float32: the weight would be read as if it had, beyond its end."""
    matrix = arrange_plain(torch.randn(64, 96).bfloat16(), is_table)
    assert matrix is not None
    weight = plain_of(matrix)
    assert weight is not None
    x, bias = torch.randn(3, 96), torch.randn(64)
    expected = torch.nn.functional.linear(x, weight.float(), bias)
    found = tiled_linear(x, matrix, bias)
    torch.testing.assert_close(found, expected)
    assert torch.equal(torch.cat([tiled_linear(row[None], matrix, bias) for row in x]), found)
    assert (multiplier(matrix, F32) is None) == (matrix.kind in OF_PAIRS)


def test_bfloat16_is_left_to_onednn_if_only_it_has_amx(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Our products in float32 take five times as long for prompts."""
    weight = torch.randn(64, 64).bfloat16()
    monkeypatch.setattr(
        "nanovllm.kernels.cpu.tiled_linear.constant",
        lambda name: 0 if name.endswith("unit_size") else constant(name),
    )
    monkeypatch.setattr(processor, "cpu_info", lambda: {"flags": "avx2 fma amx_bf16"})
    assert arranged(weight).kind == "bfloat16"  # a PyTorch without oneDNN
    monkeypatch.setattr(packed_linear, "packed_types", lambda: frozenset((F32, BF16)))
    assert arrange_plain(weight) is None and arranged(weight.float()).kind == "float32"
    in_one_order = arrange_in_one_order(weight)
    assert in_one_order is not None and in_one_order.kind == "bfloat16"
    monkeypatch.setattr(processor, "cpu_info", lambda: {"flags": "avx2 fma"})
    assert arranged(weight).kind == "bfloat16"


@pytest.mark.parametrize(("shape", "dtype"), [((64, 33), BF16), ((8, 64), BF16), ((64, 64), F32)])
def test_other_tables_are_copied(shape: tuple[int, int], dtype: torch.dtype) -> None:
    table = torch.randn(shape).to(dtype)
    found = arrange_plain(table, True)
    assert found is not None and found.codes.data_ptr() != table.data_ptr()
    x = torch.randn(2, shape[1]).to(dtype)
    assert torch.equal(tiled_linear(x, found), tiled_linear(x, arranged(table)))


def test_pages_are_replaced_in_place() -> None:
    values = torch.randn(3 * HUGE // 4 + 5)
    expected, address = values.clone(), values.data_ptr()
    huge_pages.collapse(values)
    huge_pages.collapse(values[:1])
    assert torch.equal(values, expected) and values.data_ptr() == address


def test_kernels_in_one_order_leave_nothing_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    PRODUCTS["packed"].use(monkeypatch)
    for dtype in (BF16, F32):
        weight = torch.randn(64, 64).to(dtype)
        assert cpu_kernels().arrange_plain(weight) is None
        operand = cpu_kernels(one_order=True).arrange_plain(weight)
        assert isinstance(operand, TiledMatrix)
        found = cpu_kernels().plain_of(operand)
        assert found is not None and torch.equal(found, weight)
    assert cpu_kernels(one_order=True).arrange_plain(torch.ones(64, 64).half()) is None


def test_units_have_pairs_of_inputs_next_to_each_other() -> None:
    """The layout that AMX reads: 16 outputs for each pair of inputs."""
    weight = torch.arange(64 * 64).view(64, 64).to(torch.bfloat16)
    units = pairs.to_units(weight, 32)
    assert units.shape == (2, 2, 2, 16, 16) and units.dtype == torch.int32
    pair = units[1, 1, 0, 3, 5:6].view(torch.bfloat16)
    assert torch.equal(pair, weight[37, 38:40])
    assert torch.equal(pairs.of_units(units, (64, 64)), weight)


def test_a_weight_may_begin_anywhere_in_a_tensor() -> None:
    whole = torch.randn(64 * 64 + 1).bfloat16()
    weight = whole[1:].view(64, 64)
    assert torch.equal(pairs.of_units(pairs.to_units(weight, 32), (64, 64)), weight)


def test_a_processor_with_amx_uses_it() -> None:
    flags = cpu_info().get("flags", "").split()
    if not {"amx_bf16", "avx512_bf16"} <= set(flags):
        assert constant("unit_size") == 0
        pytest.skip("this processor has no AMX")
    assert arranged(torch.ones(8, 8).bfloat16()).kind == "pairs"
    assert arranged(torch.ones(8, 8)).kind == "float32"


@pytest.mark.parametrize("size", [3, HUGE - 64, HUGE // 2, HUGE + 64, 3 * HUGE, 7 * HUGE // 2])
def test_weights_begin_with_a_huge_page(size: int) -> None:
    """Fails if a weight begins within a huge page, or small ones get any."""
    values = torch.arange(size, dtype=torch.int16).view(torch.uint8)[:size]
    copy = huge_pages.contiguous(values)
    assert torch.equal(copy, values) and copy.is_contiguous()
    if size > HUGE // 2 and hasattr(mmap, "MADV_HUGEPAGE"):
        assert copy.data_ptr() % HUGE == 0


def test_memory_of_dropped_weights_comes_back() -> None:
    """Each would stay if the map were kept."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("Linux has huge pages")
    weight = torch.ones(1 << 20)
    huge_pages.contiguous(weight)
    before = resident()
    for _ in range(16):
        huge_pages.contiguous(weight)
    assert resident() - before < 8 * HUGE


def test_weights_take_little_more_than_their_size() -> None:
    """A model may have thousands of matrices. Fails if each ends with a huge page of its own."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("Linux has huge pages")
    values = torch.ones(HUGE + HUGE // 4, dtype=torch.uint8)
    before = resident()
    kept = [huge_pages.contiguous(values) for _ in range(8)]
    assert resident() - before < sum(each.nbytes for each in kept) + HUGE


def test_the_number_of_maps_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux gives a process 65,530; after that, no library gets memory."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("Linux has huge pages")
    gc.collect()
    monkeypatch.setattr(huge_pages, "MOST_MAPS", len(huge_pages._maps) + 2)
    kept = [huge_pages.empty((HUGE,), torch.uint8) for _ in range(4)]
    assert len(huge_pages._maps) == huge_pages.MOST_MAPS
    del kept
    assert len(huge_pages._maps) == huge_pages.MOST_MAPS - 2


def test_no_huge_pages_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    values = torch.randn(1 << 20)
    assert torch.equal(huge_pages.contiguous(values.view(2, -1).t()), values.view(2, -1).t())
