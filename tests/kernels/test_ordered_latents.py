"""Attention to latent rows in one order of sums: a query gets equal bits from every step.

Decode and prefill are compared bit by bit, and with their definition. The interpreter's products
and sums depend on shapes as those of a GPU do (`gpu_sums`).
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from gpu_sums import sums_of_a_gpu  # noqa: F401  a fixture
from latents import BF16, FP16, Latents, Shape

pytestmark = pytest.mark.usefixtures("one_thread", "sums_of_a_gpu")


@pytest.fixture(autouse=True, scope="module")
def uninitialized_memory_is_nan() -> Iterator[None]:
    """Else a result that was not written may look right."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def wide_rows(num_rows: int, size: int, like: torch.Tensor) -> torch.Tensor:
    """Rows of float32 for outputs. In 16 bits, most sums in another order are equal."""
    return like.new_empty(num_rows, size, dtype=torch.float32)


def decode(
    latents: Latents, q: torch.Tensor, lens: torch.Tensor, tables: torch.Tensor,
    num_queries: int, programs: int, slots: int = 1 << 16, wide: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Two layers with one plan. `programs` share the parts of a sequence's rows."""
    from nanovllm.kernels.triton.attention import ordered_latent_decode as kernels

    sizes = latents.shape.sizes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "rows_with_room", wide_rows if wide else kernels.rows_with_room)
        patch.setattr(kernels, "MANY_ROWS", 40)
        tiles = kernels.ordered_tiles(*sizes[1:], q.dtype, q.device, num_queries * sizes[0])
        parts = -(-num_queries * sizes[0] // tiles.queries)
        patch.setattr(kernels, "num_multiprocessors", lambda device: programs * parts)
        patch.setattr(kernels, "SLOTS_BYTES", slots * 4 * parts * tiles.queries * sizes[2])
        plan = kernels.plan_ordered_latents(
            latents.shape.block_size, lens, tables, sizes, q.dtype, num_queries
        )
        first, out = (kernels.ordered_latent_decode(q, latents.layer(), plan) for _ in "12")
    assert torch.equal(first, out) and not out.isnan().any()
    return out


def prefill(
    latents: Latents, q: torch.Tensor, own: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor,
    tables: torch.Tensor | None, wide: bool = True,
) -> torch.Tensor:  # fmt: skip
    from nanovllm.kernels.triton.attention import latent_prefill as kernels
    from nanovllm.kernels.triton.attention.prefill_plan import plan_prefill

    plan = plan_prefill(cu_q, cu_k, tables, len(q))
    layer = latents.layer(tables is not None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "rows_with_room", wide_rows if wide else kernels.rows_with_room)
        return kernels.latent_prefill(q, own, own, layer, plan, one_order=True)


class Steps:
    """Steps over tokens of sequences whose rows are all in the cache."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.latents = Latents(replace(shape, queries=shape.contexts), device)
        self.begins = [0, *itertools.accumulate(shape.contexts)]
        self.device = device

    def int32(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def prefill(self, *parts: tuple[int, int, int], own: bool = False) -> torch.Tensor:
        """Compute parts (sequence, from, to) in one step; from the step's `own` rows if they are
        whole sequences."""
        ranges = [range(self.begins[i] + start, self.begins[i] + end) for i, start, end in parts]
        rows = torch.tensor([*itertools.chain(*ranges)], device=self.device)
        cu_q = self.int32([0, *itertools.accumulate(end - start for _, start, end in parts)])
        cu_k = self.int32([0, *itertools.accumulate(end for _, _, end in parts)])
        assert self.latents.own is not None
        keys = self.latents.own[rows] * (1 if own else torch.nan)
        tables = None if own else self.latents.tables[[i for i, _, _ in parts]]
        return prefill(self.latents, self.latents.q[rows], keys, cu_q, cu_k, tables)

    def decode(
        self, *parts: tuple[int, int, int], programs: int = 7, slots: int = 1 << 16
    ) -> torch.Tensor:
        """Compute parts (sequence, from, to) of a few tokens; those of shorter parts are last."""
        most = max(end - start for _, start, end in parts)
        rows, lens = [], []
        for i, start, end in parts:
            unused = [0] * (most - (end - start))
            rows += [self.begins[i] + n for n in range(start, end)] + unused
            lens += [n + 1 for n in range(start, end)] + unused
        tables, seen = self.latents.tables[[i for i, _, _ in parts]], self.int32(lens)
        q = self.latents.q[torch.tensor(rows, device=self.device)]
        q[seen == 0] = torch.nan
        out = decode(self.latents, q, seen, tables, most, programs, slots)
        assert not out[seen == 0].any(), "a row without keys is not zero"
        return out[seen > 0]


SHAPES = [
    Shape([530, 70], dtype=BF16, rank=32, rotated=16, heads=3, block_size=64),
    Shape([530, 70], dtype=FP16, heads=2, rank=24, rotated=8, block_size=16, window=280,
          all_values=True),
    Shape([290, 66], heads=3, rank=33, rotated=3, block_size=7),
    Shape([300, 66], dtype=BF16, heads=40, rank=96, rotated=24, block_size=48),
]  # fmt: skip


@pytest.mark.sampled(share=0.5)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_query_gets_equal_bits_from_every_step(kernel_device: str, shape: Shape) -> None:
    """Alone, among others, in parts of prompts of any size, after a hit, and with drafts."""
    steps = Steps(shape, kernel_device)
    n, m = shape.contexts
    first = n - (20 if shape.heads < 10 else 5)
    last = steps.prefill((0, first, n))
    ends = (first + 1, n)
    alone = [steps.decode((0, end - 1, end)) for end in ends]
    expected = last[[end - 1 - first for end in ends]]
    assert torch.equal(torch.cat(alone), expected), "alone"
    rows = [(0, end - 1, end) for end in ends]
    for programs in (1, 4):
        among = steps.decode((1, m - 1, m), *rows, (1, 0, 1), programs=programs)
        assert torch.equal(among[1:-1], expected), f"among others, {programs} programs"
    drafts = steps.decode((1, 0, 2), (0, n - 4, n), programs=5)
    assert torch.equal(drafts[2:], last[-4:]), "drafts"
    part = steps.prefill((1, 0, 3), (0, n - 5, n), (1, m - 1, m))
    assert torch.equal(part[3:-1], last[-5:]), "a smaller part"
    own = steps.prefill((1, 0, m), own=True)
    assert torch.equal(own[-1:], part[-1:]) and torch.equal(own[:3], part[:3]), "own rows"


BATCHES = [
    Shape([600, 0, 66], num_queries=4, used=[4, 0, 3], window=70, dtype=BF16, programs=3),
    Shape([520, 1, 0, 66], num_queries=3, used=[2, 1, 0, 3], rank=24, dtype=BF16, block_size=64,
          programs=3),
    Shape([70, 260], heads=40, rank=32, rotated=16, dtype=BF16, block_size=64, programs=2),
    Shape([200, 3], heads=2, rank=24, rotated=8, all_values=True, programs=2),
]  # fmt: skip


@pytest.mark.parametrize("shape", BATCHES, ids=str)
def test_decode_in_one_order_equals_its_definition(kernel_device: str, shape: Shape) -> None:
    latents = Latents(shape, kernel_device)
    args = latents.q, latents.lens, latents.tables, shape.num_queries, shape.programs
    out = decode(latents, *args, wide=False)
    assert not out[latents.lens == 0].any(), "a row without keys is not zero"
    latents.q[latents.lens == 0] = 0
    latents.check(out)


PREFILLS = [
    Shape([1, 70, 30], [1, 70, 30], heads=2, rank=24, rotated=8, dtype=BF16),
    Shape([300, 64], [3, 1], heads=40, rank=33, rotated=3, block_size=7),
    Shape([200, 100], [9, 20], heads=4, rank=24, rotated=8, window=40, all_values=True),
]


@pytest.mark.parametrize("shape", PREFILLS, ids=str)
def test_prefill_in_one_order_equals_its_definition(kernel_device: str, shape: Shape) -> None:
    latents = Latents(shape, kernel_device)
    own, ends = latents.own, (latents.cu_q, latents.cu_k)
    assert own is not None
    latents.check(prefill(latents, latents.q, own, *ends, latents.tables, wide=False))
    if shape.queries == shape.contexts:
        latents.check(prefill(latents, latents.q, own, *ends, None, wide=False))


def test_without_room_for_chunks_no_sequence_is_divided(kernel_device: str) -> None:
    shape = Shape([520, 70], heads=1, rank=16, rotated=8, dtype=BF16, block_size=64)
    steps = Steps(shape, kernel_device)
    parts = [(0, 519, 520), (1, 69, 70)]
    expected = steps.decode(*parts)
    for slots in (1, 3):
        assert torch.equal(steps.decode(*parts, slots=slots), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("heads", [1, 16, 20, 32, 128])
def test_large_batches_get_equal_bits(heads: int) -> None:
    """Of DeepSeek's sizes: from parts of prompts, decode and drafts."""
    shape = Shape([5000, 777], heads=heads, rank=512, rotated=64, dtype=BF16, block_size=64)
    steps = Steps(shape, "cuda")
    whole = steps.prefill((0, 0, 5000), own=True)
    ends = [1, 64, 255, 256, 257, 512, 1000, 4999, 5000]
    expected = whole[[end - 1 for end in ends]]
    rows = [(0, end - 1, end) for end in ends]
    assert torch.equal(torch.cat([steps.decode(row, programs=132) for row in rows]), expected)
    for programs in (1, 33, 132):
        assert torch.equal(steps.decode(*rows, (1, 776, 777), programs=programs)[:-1], expected)
    drafts = steps.decode((0, 4996, 5000), (1, 3, 5), programs=66)
    assert torch.equal(drafts[:4], whole[-4:])
    for start, end in ((4990, 5000), (250, 257), (63, 1100)):
        part = steps.prefill((1, 0, 3), (0, start, end), (1, 776, 777))
        assert torch.equal(part[3:-1], whole[start:end]), f"{start} to {end}"
