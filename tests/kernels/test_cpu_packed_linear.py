"""Linear layers with packed weights against their twin, and what they keep."""

import pytest
import torch
import torch.nn.functional as F
from conftest import Products
from rounding import linear_error

from nanovllm.formats.format import DenseMatrix, PackedMatrix
from nanovllm.kernels.cpu.table import cpu_kernels
from nanovllm.kernels.plain.packed_linear import can_pack, pack, packed_linear, packed_types
from nanovllm.kernels.table import PLAIN
from nanovllm.kernels.triton.table import triton_kernels
from nanovllm.layers.linear import matrix_of

pytestmark = pytest.mark.usefixtures("one_thread")

packed_products = pytest.mark.parametrize("products", ["packed"], indirect=True)
each_type = pytest.mark.parametrize("dtype", sorted(packed_types(), key=str))

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
ROWS = [1, 2, 7, 16, 33, 40, 257]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@each_type
def test_packed_linear_and_its_twin_are_exact(
    shape: tuple[int, int], dtype: torch.dtype, bias: bool
) -> None:
    weight = torch.randn(shape).to(dtype)
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
            assert out.dtype == dtype and out.shape == (rows, shape[0]) and out.is_contiguous()
            assert linear_error(out, x, weight, b) <= 1, f"{name}, {rows} rows"


@each_type
def test_packed_linear_reads_strided_inputs(dtype: torch.dtype) -> None:
    weight, x = torch.randn(33, 64).to(dtype), torch.randn(19, 128).to(dtype)
    for view in (x[:, ::2], x[:, 64:], x.T[:64].T, x[::2, :64], x[3:4, :64]):
        assert linear_error(packed_linear(view, pack(weight), None), view, weight) <= 1


@each_type
def test_no_rows_give_no_outputs(dtype: torch.dtype) -> None:
    packed = pack(torch.randn(8, 4).to(dtype))
    assert packed_linear(torch.empty(0, 4, dtype=dtype), packed).shape == (0, 8)


@packed_products
def test_only_fast_types_are_packed_and_no_weight_that_kernels_read(products: Products) -> None:
    pytest.importorskip("triton")
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        weight = torch.randn(4, 4).to(dtype)
        assert can_pack(weight) is (dtype in packed_types())
        form = PackedMatrix if can_pack(weight) else DenseMatrix
        assert type(matrix_of(weight, PLAIN)) is type(matrix_of(weight, cpu_kernels())) is form
        assert matrix_of(weight, triton_kernels()).operand is weight


@pytest.mark.parametrize("products", ["tiled", "packed"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_numbers_of_rows_leave_little_behind(
    dtype: torch.dtype, products: Products, capfd: pytest.CaptureFixture[str]
) -> None:
    """oneDNN keeps half a megabyte for each kernel that it compiles.

    One for each number of rows took 600 MB from the server of a small model.
    """
    matrix = matrix_of(torch.randn(23, 19).to(dtype), cpu_kernels())
    x = torch.randn(1024, 19).to(dtype)
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON_CREATION):
        for rows in range(1, 1025):
            matrix.linear(x[:rows])
    num_compiled = capfd.readouterr().out.count("create:cache_miss")
    assert num_compiled <= 32 + 8 * 5, "one for each of 32 rows, and 8 for each octave from there"
    assert num_compiled or not isinstance(matrix, PackedMatrix), "nothing was counted"
