"""Low-rank additions of Triton and of the CPU, against the plain ones and their definition.

Triton's run on a device, or interpreted where there is none.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from conftest import kernel_settings
from hypothesis import example, given
from hypothesis import strategies as st

from nanovllm.kernels.cpu.table import cpu_kernels
from nanovllm.kernels.operands.low_rank import LowRank
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.kernels.triton.lora import row_groups
from nanovllm.kernels.triton.table import triton_kernels

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Shape:
    """T rows (or of `per_row` pairs each), over some groups, of which not all have rows."""

    rows: int
    groups: int = 3
    per_row: int = 1
    size_in: int = 52
    sizes: tuple[int, ...] = (40, 24, 24)
    max_rank: int = 8
    dtype: torch.dtype = torch.float32
    shares: bool = False
    stride: int = 0  # elements between the rows of `out`
    seed: int = 0


SHAPES = st.builds(
    Shape,
    rows=st.integers(1, 70),
    groups=st.sampled_from([1, 2, 3, 8]),
    per_row=st.integers(1, 3),
    size_in=st.sampled_from([7, 52, 64, 300, 700]),
    sizes=st.sampled_from([(5,), (64,), (130, 130), (40, 24, 24), (200, 8, 8)]),
    max_rank=st.sampled_from([1, 3, 8, 16, 20, 40]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    shares=st.booleans(),
    stride=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)


@dataclass
class Inputs:
    x: torch.Tensor
    weights: LowRank
    ids: torch.Tensor
    out: torch.Tensor
    shares: torch.Tensor | None

    def to(self, device: str) -> "Inputs":
        """A copy."""
        weights = replace(
            self.weights,
            a=self.weights.a.to(device),
            b=self.weights.b.to(device),
            ranks=self.weights.ranks.to(device),
        )
        shares = None if self.shares is None else self.shares.to(device)
        size = self.out.shape[1]
        out = torch.empty_strided(self.out.shape, self.out.stride(), dtype=self.out.dtype)
        out = out.to(device).copy_(self.out)
        assert out.shape[1] == size
        return Inputs(self.x.to(device), weights, self.ids.to(device), out, shares)


def make(shape: Shape) -> Inputs:
    """Whatever must not be read is NaN."""
    generator = torch.Generator().manual_seed(shape.seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(shape.dtype)

    parts, total = len(shape.sizes), sum(shape.sizes)
    ranks = torch.randint(0, shape.max_rank + 1, (shape.groups, parts), generator=generator)
    a = torch.full((shape.groups, parts, shape.max_rank, shape.size_in), torch.nan)
    b = torch.full((shape.groups, shape.max_rank, total), torch.nan)
    a, b = a.to(shape.dtype), b.to(shape.dtype)
    for group, of_group in enumerate(ranks.tolist()):
        columns = torch.split(b[group], list(shape.sizes), 1)
        for part, rank in enumerate(of_group):
            a[group, part, :rank] = randn(rank, shape.size_in)
            columns[part][:rank] = randn(rank, shape.sizes[part])
    pairs = shape.rows * shape.per_row
    ids = torch.randint(-1, shape.groups + 1, (pairs,), generator=generator, dtype=torch.int32)
    out = randn(pairs, total + shape.stride)[:, :total]
    weights = LowRank(a.flatten(1, 2), b, ranks.int(), shape.sizes)
    shares = torch.rand(pairs, generator=generator) if shape.shares else None
    return Inputs(randn(shape.rows, shape.size_in), weights, ids, out, shares)


def compute(kernels: Kernels, inputs: Inputs) -> torch.Tensor:
    groups = kernels.group_rows(inputs.ids, len(inputs.weights.a))
    down = kernels.lora_down(inputs.x, inputs.weights, groups)
    kernels.lora_up(down, inputs.weights, groups, inputs.out, inputs.shares)
    return inputs.out


def definition(inputs: Inputs) -> torch.Tensor:
    """Row by row, in float64."""
    out, weights = inputs.out.double().clone(), inputs.weights
    per_row = len(inputs.ids) // len(inputs.x)
    for row, group in enumerate(inputs.ids.tolist()):
        if not 0 <= group < len(weights.a):
            continue
        first = 0
        for part, size in enumerate(weights.sizes):
            rank, start = int(weights.ranks[group, part]), part * weights.max_rank
            a = weights.a[group, start : start + rank].double()
            b = weights.b[group, :rank, first : first + size].double()
            added = inputs.x[row // per_row].double() @ a.T @ b
            if inputs.shares is not None:
                added *= inputs.shares[row]
            out[row, first : first + size] += added
            first += size
    return out


def check(kernels: Kernels, shape: Shape, device: str = "cpu") -> None:
    inputs = make(shape)
    before, wanted = inputs.out.clone(), definition(inputs)
    out = compute(kernels, inputs.to(device)).cpu()
    bf16 = shape.dtype == torch.bfloat16
    scale = wanted.abs().amax().clamp(min=1)
    assert (out.double() - wanted).abs().amax() <= (2e-2 if bf16 else 1e-5) * scale
    unchanged = (inputs.ids < 0) | (inputs.ids >= shape.groups)
    assert torch.equal(out[unchanged], before[unchanged]), "rows without an adapter"


@pytest.mark.slow
@kernel_settings(16)
@given(SHAPES)
@example(Shape(1))
@example(Shape(70, groups=1, size_in=300))
@example(Shape(6, groups=40, per_row=2))
def test_triton_computes_the_definition(shape: Shape) -> None:
    check(triton_kernels(), shape, DEVICE)


@kernel_settings(25)
@given(SHAPES)
@example(Shape(1, groups=1, size_in=300))
@example(Shape(3, groups=1, size_in=7, sizes=(5,), max_rank=3))
@example(Shape(70, groups=2, size_in=700, sizes=(200, 8, 8), max_rank=20, stride=1))
@example(Shape(70, per_row=3, sizes=(601, 3), max_rank=40, shares=True))
@example(Shape(6, groups=40, per_row=2, dtype=torch.bfloat16))
@pytest.mark.parametrize("kernels", [PLAIN, cpu_kernels()], ids=lambda kernels: kernels.name)
def test_the_cpu_computes_the_definition(kernels: Kernels, shape: Shape) -> None:
    check(kernels, shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_in_any_batch_on_the_cpu(dtype: torch.dtype) -> None:
    """Also beside other numbers of rows with its adapter: they are computed together."""
    shape = Shape(70, groups=2, size_in=301, sizes=(131, 40), max_rank=13, dtype=dtype, shares=True)
    inputs = make(shape)
    assert inputs.shares is not None
    expected = compute(cpu_kernels(), inputs.to("cpu"))
    for rows in [*torch.arange(70).split(1), torch.arange(3), torch.arange(0, 70, 3)]:
        some = Inputs(
            inputs.x[rows], inputs.weights, inputs.ids[rows], inputs.out[rows], inputs.shares[rows]
        )
        assert torch.equal(compute(cpu_kernels(), some), expected[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_a_result_is_the_same_on_any_number_of_threads(rows: int, dtype: torch.dtype) -> None:
    """With more work than one thread does alone."""
    sizes = (4000, 1001)
    inputs = make(Shape(rows, groups=2, size_in=3001, sizes=sizes, max_rank=30, dtype=dtype))
    outs = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        outs.append(compute(cpu_kernels(), inputs.to("cpu")))
    torch.set_num_threads(1)
    assert not torch.equal(outs[0], inputs.out)
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("out_type", [torch.float32, torch.bfloat16])
def test_the_cpu_rounds_where_the_twin_does(out_type: torch.dtype) -> None:
    """Sums of integers are exact, but many of `down` are too large for bfloat16."""
    inputs = make(Shape(70, per_row=2, size_in=301, dtype=torch.bfloat16))
    weights = replace(inputs.weights, a=4 * inputs.weights.a, b=inputs.weights.b.round())
    weights.a.round_()
    shares = torch.full((140,), 0.5)
    x, out = (4 * inputs.x).round(), inputs.out.to(out_type)
    inputs = Inputs(x, weights, inputs.ids, out, shares)
    expected = compute(PLAIN, inputs.to("cpu"))
    assert expected.dtype == out_type and not torch.equal(expected, out)
    assert torch.equal(compute(cpu_kernels(), inputs), expected)


def test_the_cpu_reads_group_ids_and_shares_at_any_distance() -> None:
    """Those of rows with drafts are an expanded column."""
    inputs = make(Shape(70, shares=True))
    assert inputs.shares is not None
    expected = compute(cpu_kernels(), inputs.to("cpu"))
    inputs.ids = inputs.ids[:, None].repeat(1, 2)[:, 0]
    inputs.shares = inputs.shares[:, None].repeat(1, 2)[:, 0]
    assert torch.equal(compute(cpu_kernels(), inputs), expected)


def test_no_rows_change_nothing_on_the_cpu() -> None:
    inputs = make(Shape(5))
    rows = slice(0, 0)
    inputs = Inputs(inputs.x[rows], inputs.weights, inputs.ids[rows], inputs.out[rows], None)
    assert compute(cpu_kernels(), inputs).shape == (0, 88)


@pytest.mark.parametrize("rows", [1, 5, 40, 300])
def test_a_division_of_many_inputs_changes_nothing_but_rounding(rows: int) -> None:
    """Few rows read A in parts, which the second kernel adds up."""
    check(triton_kernels(), Shape(rows, groups=2, size_in=3100, sizes=(33,), max_rank=5), DEVICE)


@pytest.mark.sampled
@pytest.mark.parametrize("num_groups", [1, 2, 8, 15, 16])
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 100, 512])
def test_few_rows_are_grouped_as_many_are(
    rows: int, num_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one program, or by sorting them."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(-2, num_groups + 2, (rows,), generator=generator).int().to(DEVICE)
    found = row_groups.group_rows(ids, num_groups)
    monkeypatch.setattr(row_groups, "MOST_COUNTED", 0)
    wanted = row_groups.group_rows(ids, num_groups)
    assert found[2:] == wanted[2:] and found.groups[3:] == wanted.groups[3:]
    for ids_of in (found.ids, wanted.ids):  # one outside all groups may be any such
        assert [i if 0 <= i < num_groups else -1 for i in ids_of.tolist()] == [
            i if 0 <= i < num_groups else -1 for i in ids.tolist()
        ]
    for a, b in zip(found.groups[:3], wanted.groups[:3], strict=True):
        assert a.tolist() == b.tolist()
