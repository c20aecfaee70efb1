"""The Triton attention against its twins: on a device, or interpreted where there is none.

Memory that belongs to no sequence is NaN: free blocks, the slots after a context's end, and outputs
that a kernel did not write. So every read of it is found. The twins get zeros there, and more
precision: the difference is the kernel's own error.

It costs more than 20 seconds: kernels are interpreted.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from conftest import kernel_settings
from hypothesis import example, given, settings
from hypothesis import strategies as st
from selection import examples

from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.kernels.plain import decode_attention as plain_decode
from nanovllm.kernels.plain import masked_attention
from nanovllm.kernels.plain import prefill_attention as plain_prefill
from nanovllm.kernels.plain.kv_codes import dequantize, quantize

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SETTINGS = kernel_settings(16)
TILE = 64  # where a context's length matters to the kernels


@pytest.fixture(autouse=True, scope="module")
def uninitialized_memory_is_nan() -> Iterator[None]:
    """Else `torch.empty` may return the last call's results, and a missing row looks right."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Shape:
    """A batch. Prefill: the last `queries` tokens of each context. Decode: one query each, or
    `num_queries` rows each. The last tokens of a context use as many of its rows as `used` says.
    """

    contexts: list[int]
    queries: list[int] | None = None
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = FP32
    strided: bool = True
    programs: int = 7  # of each key head, in decode
    window: int | None = None
    copies_tiles: bool = True
    overlaps: bool = False  # in the kernel for Hopper GPUs
    quantized: bool = False
    converted: bool = False  # codes, by the GPU's own conversion
    seed: int = 0
    num_queries: int = 1
    soft_cap: float | None = None
    sinks: bool = False
    used: list[int] | None = None  # all, or as many as the context has tokens

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def lens(self) -> list[int]:
        """The keys that each row of a decode step sees."""
        lens = []
        for i, n in enumerate(self.contexts):
            used = min(n, self.num_queries if self.used is None else self.used[i])
            lens += [n - used + 1 + j if j < used else 0 for j in range(self.num_queries)]
        return lens

    @property
    def num_blocks(self) -> int:
        """Two more than it needs."""
        return sum(-(-n // self.block_size) for n in self.contexts) + 2


def make_sinks(num_heads: int) -> torch.Tensor:
    """Sinks above, among and below the scores of heads: a wrong maximum or merge shows."""
    return torch.tensor([0.5, 9.0, -30.0, 3.0, 60.0])[torch.randint(5, (num_heads,))]


class Paged:
    """Random tensors of a shape, in a cache with blocks in random order."""

    def __init__(self, shape: Shape, device: str, num_blocks: int | None = None) -> None:
        torch.manual_seed(shape.seed)
        self.shape, self.device = shape, device
        options = {"dtype": shape.dtype, "device": device}
        size, kv = shape.block_size, (shape.kv_heads, shape.head_dim)
        asking = shape.queries or [shape.num_queries] * len(shape.contexts)
        counts = [-(-n // size) for n in shape.contexts]
        order = torch.randperm(num_blocks or shape.num_blocks).int()
        # Entries that no key needs name a free block.
        self.tables = order[-1].repeat(len(counts), max(counts) + 2)
        self.caches = torch.full((2, len(order), size, *kv), torch.nan, **options)
        qkv = torch.randn(sum(asking), shape.kv_heads * (shape.group + 2), shape.head_dim)
        q, self.k, self.v = qkv.to(**options).split(
            (shape.kv_heads * shape.group, shape.kv_heads, shape.kv_heads), dim=1
        )
        # Equal weights show a missing or an extra key; one large weight shows a wrong maximum or
        # merge.
        q *= torch.tensor([0.1, 1.0, 4.0])[torch.randint(3, (len(q), 1, 1))].to(**options)
        self.q = q if shape.strided else q.contiguous()
        self.sinks = make_sinks(q.shape[1]).to(device) if shape.sinks else None
        ends = itertools.accumulate(asking)
        self.whole: list[tuple[slice, torch.Tensor]] = []  # rows and slots without a cached part
        blocks = order[:-1].split([*counts, len(order) - 1 - sum(counts)])
        for row, (n, new, end) in enumerate(zip(shape.contexts, asking, ends, strict=True)):
            self.tables[row, : counts[row]] = blocks[row]
            slots = (blocks[row][:, None] * size + torch.arange(size)).flatten()[:n]
            keys_values = torch.randn(2, n, *kv, device=device).to(shape.dtype)
            self.caches.flatten(1, 2)[:, slots.to(device)] = keys_values
            if shape.window:  # a block that no query sees has been freed
                first = n - new + 1 if shape.queries else shape.lens[row * new]
                self.tables[row, : max(0, first - shape.window) // size] = order[-1]
            if shape.queries:
                self.k[end - new : end], self.v[end - new : end] = keys_values[:, n - new :]
                if new == n:
                    self.whole.append((slice(end - new, end), slots.to(device)))
        if shape.quantized:
            self._quantize()
        self.tables = self.tables.to(device)
        self.lens = torch.tensor(shape.lens, dtype=torch.int32, device=device)
        self.cu_q, self.cu_k = (
            torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device=device)
            for n in (asking, shape.contexts)
        )

    def _quantize(self) -> None:
        """Make codes and scales of the caches, which become what those stand for."""
        unowned = self.caches.isnan()
        quantized = [quantize(x.flatten(0, 1)) for x in self.caches.nan_to_num()]
        self.codes, scales = (torch.stack(x) for x in zip(*quantized, strict=True))
        size, kv_heads = self.shape.block_size, self.shape.kv_heads
        self.scales = scales.view(2, -1, size, kv_heads)
        self.codes = self.codes.view(self.caches.shape)
        self.caches = dequantize(self.codes, self.scales, FP32)
        self.codes.view(torch.uint8)[unowned] = 0x7F  # NaN
        self.scales[unowned[..., 0]] = torch.nan
        self.scales = self.scales.transpose(2, 3).contiguous()
        self.caches[unowned] = torch.nan

    def kernel_layer(self) -> KVLayer:
        """The cache as kernels get it."""
        if not self.shape.quantized:
            return self.layer(*self.caches)
        k_scales, v_scales = self.scales
        kv = self.layer(*self.codes)
        return replace(kv, k_scales=k_scales, v_scales=v_scales)

    def layer(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> KVLayer:
        shape = self.shape
        return KVLayer(
            k_cache, v_cache, shape.scale, shape.window, soft_cap=shape.soft_cap, sinks=self.sinks
        )

    # The kernels.

    def decode(self, layers: int = 1) -> torch.Tensor:
        """Layers with one plan: a second one reads the counters that the first one has reset."""
        from nanovllm.kernels.triton.attention import decode_attention as kernels
        from nanovllm.kernels.triton.attention import decode_plan, decode_tiles

        with pytest.MonkeyPatch.context() as patch:
            heads = self.shape.kv_heads
            patch.setattr(decode_plan, "PROGRAMS_PER_MULTIPROCESSOR", self.shape.programs)
            patch.setattr(decode_plan, "num_multiprocessors", lambda device: heads)
            plan = decode_plan.plan_decode(
                self.lens, self.tables, heads, self.shape.copies_tiles, self.shape.num_queries
            )
        assert len(plan.starts) == self.shape.programs
        torch.zeros(1, device=self.device)  # as in a step, a kernel lies between
        outs = []
        for _ in range(layers):
            with self.conversion(decode_tiles):
                outs.append(kernels.decode_attention(self.q, self.kernel_layer(), plan))
            assert not plan.arrivals.any(), "the counters are not reset for the next layer"
        assert not outs[0].isnan().any(), "it read unowned memory, or did not write a result"
        assert torch.equal(outs[0], outs[-1]), "the second layer differs from the first"
        return outs[0]

    def prefill(self, use_cache: bool) -> torch.Tensor:
        """As the runner calls it: with the step's own keys, or with everything in the cache."""
        from nanovllm.kernels.triton.attention import prefill_attention as kernels
        from nanovllm.kernels.triton.attention.prefill_plan import plan_prefill
        from nanovllm.kernels.triton.common import can_copy_tiles

        tables = self.tables if use_cache else None
        plan = plan_prefill(self.cu_q, self.cu_k, tables, len(self.q))
        if use_cache:
            keys = (*self._own_keys(), self.kernel_layer())
        else:
            assert self.shape.queries == self.shape.contexts
            keys = (self.k, self.v, self.layer(torch.empty(0), torch.empty(0)))
        plan.overlaps = self.shape.overlaps
        own = self.shape.quantized or not use_cache
        if own and can_copy_tiles(self.q.device):  # however few tokens there are
            plan.copies_tiles = self.shape.copies_tiles
        with self.conversion(kernels):
            return kernels.prefill_attention(self.q, *keys, plan)

    def _own_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of a step that the kernel reads besides the cache; others are NaN.

        The kernel reads them for sequences without a cached part if the cache is quantized. They
        are rounded to codes, and then to their type, as `store_kvcache` returns them.
        """
        k, v = torch.full((2, *self.k.shape), torch.nan).to(self.k)
        for rows, slots in self.whole if self.shape.quantized else []:
            stored = self.caches.flatten(1, 2)[:, slots].to(k.dtype)
            k[rows], v[rows] = stored
            self.caches.flatten(1, 2)[:, slots] = stored.float()
        return k, v

    @contextmanager
    def conversion(self, kernels: Any) -> Iterator[None]:
        """Read codes as the shape says, where the device can."""
        from nanovllm.kernels.triton.common import capability

        can = self.device == "cpu" or capability(self.q.device) >= 89
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "converts_codes", lambda device: self.shape.converted and can)
            yield

    # The twins.

    def twin_decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """A few rows at a time, which bounds the memory; each is a sequence of its own."""
        size, kv, outs = self.shape.block_size, self.layer(k, v), []
        tables = self.tables.repeat_interleave(self.shape.num_queries, dim=0)
        for rows in torch.arange(len(q), device=self.device).split(8):
            plan = plain_decode.plan_decode(self.lens[rows], tables[rows], size)
            outs.append(plain_decode.decode_attention(q[rows], kv, plan))
        return torch.cat(outs)

    def twin_prefill(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """From the cache, which has the new keys too, in slices that bound the memory."""
        plan = plain_prefill.plan_prefill(self.cu_q, self.cu_k, self.tables, self.shape.block_size)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(masked_attention, "MAX_MASK_ELEMENTS", 1 << 21)
            return plain_prefill.prefill_attention(q, q, q, self.layer(k, v), plan)


Twin = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def assert_near(out: torch.Tensor, twin: Twin, paged: Paged) -> None:
    """A weight's error counts by the size of its value, so that the twin gives the bound too.

    16-bit kernels round each weight and each result once, by half an eps: together an eps of
    sum(weights * |values|). What float32 loses in scores, exponentials and sums is below 2e-5 of
    it: scores are below about 30 and sums of up to 256 products, so that they err by some times
    2e-6, and sums of 700 weights by less than that. At sizes where the twin computes in float32
    too, both do, over more keys.
    """
    wide = torch.float64 if paged.caches.numel() < 1 << 22 else torch.float32
    clean = torch.where(paged.caches.isnan(), 0, paged.caches).to(wide)
    q = paged.q.to(wide)
    expected, spread = twin(q, *clean), twin(q, clean[0], clean[1].abs_())
    eps = 0.0 if paged.shape.dtype == FP32 else torch.finfo(paged.shape.dtype).eps
    float32 = 2e-5 if wide == torch.float64 else 4e-5
    # A weight far below the greatest is subnormal in float16: it loses 2^-25 of a value of 1.
    nothing = 2e-5 if paged.shape.dtype == FP16 else 1e-7
    allowed = (eps + float32) * spread + nothing
    assert out.dtype == paged.shape.dtype and out.shape == paged.q.shape and out.is_contiguous()
    excess = (out.to(wide) - expected).abs() / allowed
    worst = excess.nan_to_num(torch.inf).flatten(1).amax(1)
    assert worst.max() <= 1, f"{worst.max():.3g} times what is allowed, in row {worst.argmax()}"


def assert_decodes_as_its_twin(
    shape: Shape, device: str, make: type[Paged] = Paged, layers: int = 1
) -> None:
    paged = make(shape, device)
    paged.q[paged.lens == 0] = torch.nan  # left by an earlier batch
    out = paged.decode(layers)
    paged.q[paged.lens == 0] = 0
    assert not out[paged.lens == 0].any(), "a row without keys is not zero"
    assert_near(out, paged.twin_decode, paged)


def assert_prefills_as_its_twin(
    shape: Shape, use_cache: bool, device: str, make: type[Paged] = Paged
) -> None:
    paged = make(shape, device)
    assert_near(paged.prefill(use_cache), paged.twin_prefill, paged)


AROUND_TILES = st.sampled_from(
    [TILE - 1, TILE, TILE + 1, 2 * TILE - 1, 2 * TILE, 2 * TILE + 1, 3 * TILE, 5 * TILE]
)
HEADS = dict(
    kv_heads=st.integers(1, 4),
    group=st.sampled_from([1, 2, 4, 5, 7, 8, 16]),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    block_size=st.sampled_from([16, 32, 48, 64, 128, 256]),
    dtype=st.sampled_from([FP32, FP32, BF16, FP16]),
    strided=st.booleans(),
    copies_tiles=st.booleans(),
    window=st.one_of(st.none(), st.none(), AROUND_TILES, st.integers(1, 100)),
    seed=st.integers(0, 2**31),
)

SINKS = dict(sinks=st.booleans())
CAPPED = HEADS | SINKS | dict(soft_cap=st.sampled_from([None, 0.5, 3.0]))
QUANTIZED = HEADS | SINKS | dict(quantized=st.just(True), converted=st.booleans())

# Decode

CONTEXT = st.one_of(st.integers(0, 5), AROUND_TILES, st.integers(0, 200))


@st.composite
def batches(draw: st.DrawFn) -> list[int]:
    """Many short contexts, and sometimes one that outweighs them all."""
    contexts = draw(st.lists(CONTEXT, min_size=1, max_size=9))
    long = draw(st.one_of(st.none(), st.integers(300, 700)))
    if long is not None:
        contexts.insert(draw(st.integers(0, len(contexts))), long)
    return contexts


@pytest.mark.slow
@SETTINGS
@given(
    st.builds(Shape, contexts=batches(), programs=st.sampled_from([1, 2, 3, 5, 8, 13]), **CAPPED)
)
def test_decode_equals_its_twin(kernel_device: str, shape: Shape) -> None:
    assert_decodes_as_its_twin(shape, kernel_device, layers=2)


@pytest.mark.slow
@SETTINGS
@given(st.builds(Shape, contexts=batches(), programs=st.sampled_from([1, 3, 8]), **QUANTIZED))
@example(Shape([130, 0, 64, 500, 63], head_dim=128, block_size=64, dtype=BF16, quantized=True))
@example(Shape([130, 0, 64, 500], block_size=64, dtype=FP16, quantized=True, window=100))
@example(Shape([130, 64, 500], block_size=256, dtype=BF16, quantized=True, converted=True))
@example(Shape([130, 0, 500], dtype=BF16, quantized=True, sinks=True, window=100))
def test_decode_of_codes_equals_its_twin(kernel_device: str, shape: Shape) -> None:
    assert_decodes_as_its_twin(shape, kernel_device, layers=2)


# Several queries of a sequence

DRAFTS = [
    Shape([1, 5, 64, 65, 300, 4, 3], num_queries=5, used=[1, 5, 5, 2, 5, 0, 3], group=4),
    Shape([70, 200], num_queries=9, used=[9, 3], group=16, kv_heads=1),
    Shape([66, 0, 130], num_queries=5, group=1, window=3),
    Shape([66, 0, 130], num_queries=5, window=70, soft_cap=2.0, dtype=BF16),
    Shape([500, 66], num_queries=5, used=[3, 5], head_dim=128, dtype=BF16, block_size=64, group=4),
    Shape([130, 67], num_queries=5, head_dim=128, dtype=BF16, block_size=64, group=4, window=64),
    Shape([131, 5], num_queries=4, head_dim=256, dtype=BF16, group=8, block_size=128),
    Shape([500, 66, 3], num_queries=5, used=[3, 5, 2], block_size=64, group=4, quantized=True),
    Shape([130, 67], num_queries=5, dtype=FP16, block_size=64, window=64, quantized=True),
    Shape([70, 200], num_queries=3, group=16, dtype=BF16, block_size=16, quantized=True),
    Shape([300, 0, 66], num_queries=4, used=[4, 0, 3], group=8, window=70, sinks=True),
    Shape([300, 66], num_queries=3, dtype=BF16, block_size=64, sinks=True, quantized=True),
]


@pytest.mark.sampled
@pytest.mark.parametrize("programs", [1, 3, 13])
@pytest.mark.parametrize("shape", DRAFTS, ids=str)
def test_several_queries_of_a_sequence_equal_their_twin(
    kernel_device: str, shape: Shape, programs: int
) -> None:
    """A tile may have keys that a part of the queries sees, or that no one of a share's sees."""
    assert_decodes_as_its_twin(replace(shape, programs=programs), kernel_device)


@pytest.mark.slow
@SETTINGS
@given(
    st.builds(Shape, contexts=batches(), num_queries=st.integers(2, 9),
              programs=st.sampled_from([1, 3, 8]), quantized=st.booleans(), **HEADS),
    st.data(),
)  # fmt: skip
def test_any_number_of_queries_equals_its_twin(
    kernel_device: str, shape: Shape, data: st.DataObject
) -> None:
    some = st.integers(1, shape.num_queries)
    used = data.draw(st.lists(some, min_size=len(shape.contexts), max_size=len(shape.contexts)))
    assert_decodes_as_its_twin(replace(shape, used=used), kernel_device, layers=2)


@pytest.mark.sampled(share=0.2)
@pytest.mark.parametrize("shape", DRAFTS, ids=str)
def test_queries_of_a_sequence_equal_sequences_of_one_query(
    kernel_device: str, shape: Shape
) -> None:
    """And do not depend on how many of the later rows are used."""
    many = Paged(shape, kernel_device)
    many.q.nan_to_num_()
    alone = Paged(shape, kernel_device)
    alone.q, alone.lens = many.q, many.lens
    alone.tables = many.tables.repeat_interleave(shape.num_queries, dim=0)
    alone.shape = replace(shape, num_queries=1, contexts=shape.lens)
    eps = 1e-5 if shape.dtype == FP32 else 2 * torch.finfo(shape.dtype).eps
    expected = alone.decode()
    close = dict(rtol=eps, atol=eps * float(many.caches[1].nan_to_num().abs().max()))
    torch.testing.assert_close(many.decode(), expected, **close)
    many.lens.view(-1, shape.num_queries)[:, -2:] = 0
    expected[many.lens == 0] = 0
    torch.testing.assert_close(many.decode(), expected, **close)


class OfManySizes(Paged):
    """Values from 2^20 to 2^60, and queries that are too large for float16 while keys are small.

    Larger values have smaller weights: each size has its part in the result.
    """

    SHIFT = 2.0**20

    def _quantize(self) -> None:
        powers = torch.randint(20, 60, self.caches.shape[1:3], device=self.caches.device)[
            ..., None, None
        ]
        self.caches[1] *= 2.0**powers
        self.caches[0] /= self.SHIFT
        self.caches[0, ..., 0] = -powers[..., 0] * math.log(2) / self.shape.scale / self.SHIFT
        self.q *= self.SHIFT
        self.q[..., 0] = self.SHIFT
        super()._quantize()


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_decode_of_codes_of_many_sizes_equals_its_twin(
    kernel_device: str, dtype: torch.dtype
) -> None:
    """Weights in float16 are relative to the largest product of a weight and a scale."""
    shape = Shape([130, 300], head_dim=32, block_size=64, dtype=dtype, quantized=True)
    assert_decodes_as_its_twin(shape, kernel_device, OfManySizes)


@pytest.mark.sampled(share=0.35)
@pytest.mark.slow
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("window", [1, 64, 65, 200])
def test_decode_sees_only_its_window(kernel_device: str, window: int, block_size: int) -> None:
    """Shares that are before the window entirely, and windows that begin or end at a tile."""
    contexts = [640, 1, 0, 64, 65, 129, 700]
    for programs in (1, 5, 13):
        shape = Shape(contexts, programs=programs, window=window, block_size=block_size)
        assert_decodes_as_its_twin(shape, kernel_device)


LARGE_HEADS: dict[str, Any] = dict(kv_heads=3, head_dim=128, dtype=BF16)


@pytest.mark.sampled(share=0.35)
@pytest.mark.slow
@pytest.mark.parametrize("block_size", [64, 256])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("group", [2, 16])
def test_decode_with_copied_tiles_equals_its_twin(
    kernel_device: str, group: int, window: int | None, block_size: int
) -> None:
    """Tiles after a context's end, or of another row or head, must not be copied."""
    shape = Shape([130, 0, 64, 500, 63], group=group, window=window, **LARGE_HEADS)
    assert_decodes_as_its_twin(replace(shape, block_size=block_size), kernel_device)


@pytest.mark.parametrize("group", [1, 4])
def test_prefill_with_copied_tiles_equals_its_twin(kernel_device: str, group: int) -> None:
    lens = [300, 1, 64, 130]
    assert_prefills_as_its_twin(Shape(lens, lens, group=group, **LARGE_HEADS), False, kernel_device)


def test_short_steps_do_not_copy_tiles(kernel_device: str) -> None:
    from nanovllm.kernels.triton.attention.prefill_plan import plan_prefill
    from nanovllm.kernels.triton.common import can_copy_tiles

    ends = torch.tensor([0, 5000], dtype=torch.int32, device=kernel_device)
    copied = [plan_prefill(ends, ends, None, size).copies_tiles for size in (4096, 4095)]
    assert copied == [can_copy_tiles(ends.device), False]


@pytest.mark.sampled(share=0.25)
@pytest.mark.slow
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("window", [1, 64, 65, 200])
def test_prefill_sees_only_its_window(kernel_device: str, window: int, use_cache: bool) -> None:
    """Some queries see no key of the first tile that their neighbours see."""
    queries = [200, 1, 64, 130]
    contexts = [n + 170 * i for i, n in enumerate(queries)] if use_cache else queries
    assert_prefills_as_its_twin(Shape(contexts, queries, window=window), use_cache, kernel_device)


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("block_size", [32, 128])
@pytest.mark.parametrize("programs", [1, 3, 13])
@pytest.mark.parametrize(
    "contexts",
    [
        [0, 0, 0], [0, 70, 3], [70, 0, 3], [70, 3, 0], [1], [63], [64], [65], [128], [700],
        [64, 64, 64, 64], [5, 640, 1, 70], [640, 1, 1], [1, 1, 640], [1] * 33,
    ],
    ids=str,
)  # fmt: skip
def test_decode_computes_every_row_and_share(
    kernel_device: str, contexts: list[int], programs: int, block_size: int
) -> None:
    shape = Shape(contexts, programs=programs, kv_heads=1, group=3, block_size=block_size)
    assert_decodes_as_its_twin(shape, kernel_device)


@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("batch_size", [1, 511, 512, 513, 1100])
def test_shares_cover_the_contexts_without_overlap(
    kernel_device: str, batch_size: int, num_queries: int
) -> None:
    """For batches larger than the plan reads at once; a sequence without keys counts as a tile."""
    from nanovllm.kernels.triton.attention import decode_plan

    torch.manual_seed(batch_size)
    lens = torch.randint(0, 200, (batch_size,), dtype=torch.int32)
    rows = torch.stack([lens - 2, lens - 1, lens], dim=1).clamp(min=0)[:, -num_queries:]
    if num_queries > 1:  # of some, the last row is not used
        rows = torch.where(lens[:, None] % 2 > 0, rows, torch.stack([lens - 1, lens, 0 * lens], 1))
        rows = rows.clamp(min=0)
    tiles = [-(-max(n, 1) // TILE) for n in lens.tolist()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_plan, "num_multiprocessors", lambda device: 11)
        patch.setattr(decode_plan, "PROGRAMS_PER_MULTIPROCESSOR", 1)
        plan = decode_plan.plan_decode(
            rows.flatten().contiguous().to(kernel_device), torch.zeros(1), 1, False, num_queries
        )
    share = max(-(-sum(tiles) // 11), decode_plan.MIN_SHARE)
    line = [(row, sum(tiles[:row]), int(lens[row]), share) for row in range(batch_size)]
    line = [start for start, n in zip(line, tiles, strict=True) for _ in range(n)]
    starts = [tuple(start) for start in plan.starts.tolist()]
    assert starts[: -(-len(line) // share)] == line[::share]
    assert all(row >= batch_size for row, *_ in starts[-(-len(line) // share) :])


SINKING = [
    Shape([5, 500, 0, 70], sinks=True),  # a row of three programs: its sink counts once
    Shape([500, 3], window=64, block_size=16, sinks=True),  # parts before the window have no key
    Shape([500, 0, 64], head_dim=128, block_size=64, dtype=BF16, group=8, sinks=True),
    Shape([500, 64, 65], dtype=BF16, quantized=True, sinks=True),
]


@pytest.mark.parametrize("shape", SINKING, ids=str)
def test_sinks_count_once_in_decode(kernel_device: str, shape: Shape) -> None:
    for programs in (1, 4):
        assert_decodes_as_its_twin(replace(shape, programs=programs), kernel_device)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("window", [None, 20])
def test_sinks_count_once_in_prefill(
    kernel_device: str, use_cache: bool, window: int | None
) -> None:
    contexts = [90, 3]
    queries = [70, 3] if use_cache else contexts
    shape = Shape(contexts, queries, group=4, dtype=BF16, window=window, sinks=True)
    assert_prefills_as_its_twin(shape, use_cache, kernel_device)


@pytest.mark.slow
def test_programs_may_finish_in_any_order(
    kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter runs one program after the other, here in random order."""
    from triton.runtime.interpreter import InterpreterBuilder

    if kernel_device != "cpu":
        pytest.skip("a device has an order of its own")
    set_index = InterpreterBuilder.set_grid_idx

    def shuffled(self: Any, x: int, y: int, z: int) -> None:
        heads, programs, _ = self.grid_dim
        order = torch.randperm(heads * programs, generator=torch.Generator().manual_seed(seed))
        set_index(self, *divmod(int(order[x * programs + y]), programs), z)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", shuffled)
    for seed in range(5):
        shape = Shape([5, 500, 0, 70], kv_heads=3, programs=4, seed=seed)
        assert_decodes_as_its_twin(shape, kernel_device)


@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_any_number_of_programs_covers_the_batch(kernel_device: str, kv_heads: int) -> None:
    """As many programs as the device has room for, and one where it has room for none."""
    from nanovllm.kernels.triton.attention.decode_attention import decode_attention
    from nanovllm.kernels.triton.attention.decode_plan import (
        PROGRAMS_PER_MULTIPROCESSOR,
        plan_decode,
    )
    from nanovllm.kernels.triton.common import num_multiprocessors

    for heads in (kv_heads, 10_000):
        lens = torch.tensor([3, 0, 150], dtype=torch.int32, device=kernel_device)
        plan = plan_decode(lens, torch.zeros_like(lens)[:, None], heads, False)
        room = num_multiprocessors(lens.device) * PROGRAMS_PER_MULTIPROCESSOR
        assert len(plan.starts) == max(1, room // heads)
        assert plan.arrivals.shape == (len(plan.starts), heads) and not plan.arrivals.any()
    for queries, group, halves in ((1, 64, 1), (3, 8, 1), (3, 11, 2)):  # what registers hold
        plan = plan_decode(lens, torch.zeros(1, 1), kv_heads, False, queries, group)
        assert len(plan.starts) == max(1, room // kv_heads // halves)
    paged = Paged(Shape([150, 0, 3, 321], kv_heads=kv_heads), kernel_device)
    plan = plan_decode(paged.lens, paged.tables, kv_heads, True)
    out = decode_attention(paged.q, paged.layer(*paged.caches), plan)
    assert_near(out, paged.twin_decode, paged)


# Prefill


@st.composite
def prefills(draw: st.DrawFn, fresh: bool, heads: dict[str, Any] = CAPPED) -> Shape:
    """Sequences of a few tiles; a tile has more queries if fewer heads share a key head."""
    shape = draw(st.builds(Shape, contexts=st.just([]), **heads | {"kv_heads": st.integers(1, 2)}))
    block_q = TILE // (1 << (shape.group - 1).bit_length())
    full_tiles = st.sampled_from([block_q - 1, block_q, block_q + 1, 2 * block_q + 1])
    asking = st.one_of(st.just(1), full_tiles, st.integers(1, 3 * block_q)).map(lambda n: n or 1)
    prefix = st.just(0) if fresh else st.one_of(st.just(0), AROUND_TILES, st.integers(0, 300))
    sequences = draw(st.lists(st.tuples(prefix, asking), min_size=1, max_size=4))
    contexts = [cached + new for cached, new in sequences]
    return replace(shape, contexts=contexts, queries=[new for _, new in sequences])


@pytest.mark.slow
@SETTINGS
@given(prefills(fresh=True))
@example(Shape([1], [1]))
@example(Shape([1, 200, 1, 64, 1], [1, 200, 1, 64, 1], group=1))
@example(Shape([1, 200, 64], [1, 200, 64], head_dim=128, dtype=BF16, soft_cap=2.0))
@example(Shape([1, 200, 64], [1, 200, 64], group=7, window=64, sinks=True))
def test_fresh_prefill_equals_its_twin(kernel_device: str, shape: Shape) -> None:
    assert_prefills_as_its_twin(shape, False, kernel_device)


@pytest.mark.slow
@SETTINGS
@given(prefills(fresh=False))
@example(Shape([1], [1]))
@example(Shape([500, 1, 64, 129, 65], [1, 1, 64, 65, 64], group=1))
@example(Shape([63, 130, 190], [1, 68, 64], group=1))  # a first query before the last key of a tile
@example(Shape([64, 65, 127, 128, 129, 130], [1, 2, 63, 64, 1, 66], group=16))
def test_prefill_from_the_cache_equals_its_twin(kernel_device: str, shape: Shape) -> None:
    assert_prefills_as_its_twin(shape, True, kernel_device)


@pytest.mark.slow
@SETTINGS
@given(prefills(fresh=False, heads=QUANTIZED))
@example(Shape([500, 129, 65], [1, 65, 64], block_size=64, dtype=BF16, quantized=True))
@example(Shape([500, 129], [1, 65], dtype=FP16, quantized=True, window=70))
@example(Shape([500, 129], [1, 65], dtype=BF16, quantized=True, converted=True))
@example(Shape([500, 129], [1, 65], dtype=BF16, quantized=True, sinks=True, window=70))
@example(Shape([500, 129, 70], [1, 129, 70], head_dim=64, dtype=BF16, quantized=True))
@example(Shape([70, 129], [70, 65], dtype=FP16, quantized=True, window=50, strided=True))
def test_prefill_from_codes_equals_its_twin(kernel_device: str, shape: Shape) -> None:
    assert_prefills_as_its_twin(shape, True, kernel_device)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=20), st.integers(1, 64))
def test_every_query_is_in_one_tile(kernel_device: str, queries: list[int], tile: int) -> None:
    """Surplus programs do nothing."""
    from nanovllm.kernels.triton.attention.prefill_plan import plan_prefill

    ends = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
    ends = ends.to(kernel_device)
    plan = plan_prefill(ends, ends, None, sum(queries))
    tiles = plan.tiles(tile)
    counts = [-(-n // tile) for n in queries]
    expected = [seq for seq, n in enumerate(counts) for _ in range(n)]
    expected += [len(queries)] * (len(tiles.seqs) - len(expected))
    assert tiles.seqs.tolist() == expected
    assert tiles.ends.tolist() == [*itertools.accumulate(counts)]
    assert plan.tiles(tile) is tiles, "the next layer makes them again"


# An independent definition


def by_hand(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> list[float]:
    """One query [D] attends to one key after the other."""
    weights = [sum(a * b for a, b in zip(q, key, strict=True)).exp() for key in keys]
    columns = zip(*values, strict=True)
    return [
        float(sum(w * x for w, x in zip(weights, column, strict=True)) / sum(weights))
        for column in columns
    ]


@pytest.mark.parametrize("is_prefill", [True, False])
def test_kernel_and_twin_equal_the_formula(kernel_device: str, is_prefill: bool) -> None:
    """Causality, grouped heads and blocks, computed independently."""
    shape = Shape([21, 2], [4, 2] if is_prefill else None, group=3)
    paged = Paged(shape, kernel_device)
    out = paged.prefill(use_cache=True) if is_prefill else paged.decode()
    asking = shape.queries or [1, 1]
    q = (paged.q.double() * shape.scale).cpu()
    rows, tables = iter(zip(q, out.cpu(), strict=True)), paged.tables.tolist()
    k_cache, v_cache = paged.caches.double().cpu()
    for n, new, table in zip(shape.contexts, asking, tables, strict=True):
        at = [(table[position // 16], position % 16) for position in range(n)]
        for position in range(n - new, n):
            query, result = next(rows)
            for head in (0, 2, 3, 5):
                keys, values = (
                    torch.stack([x[slot][head // 3] for slot in at[: position + 1]])
                    for x in (k_cache, v_cache)
                )
                expected = torch.tensor(by_hand(query[head], keys, values))
                torch.testing.assert_close(result[head], expected, rtol=1e-5, atol=1e-5)


# At the size of real batches

REAL_HEADS = pytest.mark.parametrize(("kv_heads", "group"), [(8, 2), (8, 4)])


def real_lengths(batch_size: int, longest: int) -> list[int]:
    """Mostly short ones, and the longest at the end."""
    lengths = (torch.rand(batch_size - 1) ** 3 * longest).long() + 1
    return [*lengths.tolist(), longest]


@pytest.mark.cuda
@REAL_HEADS
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_graph_decodes_the_lengths_of_its_replay(
    kv_heads: int, group: int, block_size: int, dtype: torch.dtype
) -> None:
    """Lengths, tables, queries and caches change in place; the plan is made within the graph."""
    replay_other_batches(
        "cuda", 64, 4096, kv_heads=kv_heads, group=group, head_dim=128, block_size=block_size,
        dtype=dtype,
    )  # fmt: skip


def replay_other_batches(device: str, batch_size: int, longest: int, **options: Any) -> None:
    torch.manual_seed(0)
    shape = Shape(real_lengths(batch_size, longest), **options)
    lengths = torch.tensor(shape.contexts)
    batches = [
        [1] * batch_size,
        shape.contexts,
        [0] * batch_size,
        lengths.flip(0).tolist(),
        lengths.where(torch.arange(batch_size) % 3 > 0, 0).tolist(),
        [longest] + [0] * (batch_size - 1),
        [1] * (batch_size - 1) + [longest],
        [1] * batch_size,
    ]
    num_blocks = shape.num_blocks + batch_size  # one for each context that becomes one of 1
    static = Paged(replace(shape, contexts=batches[0]), device, num_blocks)
    static.tables = static.tables.repeat(1, longest // shape.block_size + 3)
    step = capture(static)
    for seed, contexts in enumerate(batches):
        used = torch.randint(1, shape.num_queries + 1, (batch_size,)).tolist()
        batch = replace(shape, contexts=contexts, used=used, seed=seed)
        paged = Paged(batch, device, num_blocks)
        paged.q[paged.lens == 0] = torch.nan
        for name in ("q", "lens", *(("codes", "scales") if shape.quantized else ("caches",))):
            getattr(static, name).copy_(getattr(paged, name))
        # As in the engine, rows keep the entries of an earlier batch after their own.
        static.tables[:, : paged.tables.shape[1]] = paged.tables
        out, again, arrivals = step()
        assert not arrivals.any() and torch.equal(out, again)
        assert not out[paged.lens == 0].any(), "padding is not zero"
        paged.q[paged.lens == 0] = 0
        assert_near(out, paged.twin_decode, paged)


def capture(static: Paged) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Two layers of a decode step and its plan: a graph, or a function on the CPU."""
    from nanovllm.kernels.triton.attention.decode_attention import decode_attention
    from nanovllm.kernels.triton.attention.decode_plan import plan_decode

    def step() -> tuple[torch.Tensor, ...]:
        shape = static.shape
        plan = plan_decode(static.lens, static.tables, shape.kv_heads, True, shape.num_queries)
        torch.zeros(1, device=static.device)  # as in a step, a kernel lies between
        outs = [decode_attention(static.q, static.kernel_layer(), plan) for _ in range(2)]
        return *outs, plan.arrivals

    if static.device == "cpu":
        return step
    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay() -> tuple[torch.Tensor, ...]:
        graph.replay()
        return results

    return replay


@pytest.mark.slow
def test_one_decode_step_computes_batches_of_other_lengths(kernel_device: str) -> None:
    """Without a graph, and small enough for the interpreter."""
    replay_other_batches(kernel_device, 5, 300, kv_heads=2, group=3)
    replay_other_batches(kernel_device, 3, 200, kv_heads=2, group=3, num_queries=3)


@pytest.mark.cuda
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("group", "num_queries"), [(2, 5), (4, 5), (4, 9), (8, 5)])
def test_a_graph_decodes_several_queries_of_a_sequence(
    group: int, num_queries: int, quantized: bool
) -> None:
    replay_other_batches(
        "cuda", 32, 3000, kv_heads=8, group=group, head_dim=128, block_size=64, dtype=BF16,
        num_queries=num_queries, quantized=quantized,
    )  # fmt: skip


@pytest.mark.sampled(share=0.35)
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("contexts", [[131072, 1], [70_001, 60_000]], ids=str)
def test_decode_of_a_long_context_equals_its_twin(
    contexts: list[int], block_size: int, dtype: torch.dtype
) -> None:
    shape = Shape(
        contexts, kv_heads=8, group=4, head_dim=128, block_size=block_size, dtype=dtype,
        programs=66,
    )  # fmt: skip
    assert_decodes_as_its_twin(shape, "cuda")


LARGE_PREFILLS = {
    "fresh": ([4096], [4096]),
    "fresh, ragged": ([3000, 1, 64, 65, 800, 4000, 129], [3000, 1, 64, 65, 800, 4000, 129]),
    "chunks": ([8192, 5000, 300], [2048, 4096, 1]),
    "long": ([8192], [8192]),
}


@pytest.mark.sampled(share=0.3)
@pytest.mark.cuda
@REAL_HEADS
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", LARGE_PREFILLS)
def test_large_prefill_equals_its_twin(
    name: str, kv_heads: int, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    contexts, queries = LARGE_PREFILLS[name]
    for block_size in (16, 256):
        shape = Shape(
            contexts, queries, kv_heads, group, head_dim, block_size=block_size, dtype=dtype
        )
        assert_prefills_as_its_twin(shape, True, "cuda")
    if contexts == queries:
        assert_prefills_as_its_twin(shape, False, "cuda")


@pytest.mark.cuda
@REAL_HEADS
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_equal_flash_attention(kv_heads: int, group: int, head_dim: int) -> None:
    """An independent implementation, with the same bound."""
    flash_attn = pytest.importorskip("flash_attn")
    options = dict(kv_heads=kv_heads, group=group, head_dim=head_dim, block_size=256, dtype=BF16)

    torch.manual_seed(0)
    paged = Paged(Shape(real_lengths(64, 4096), **options), "cuda")
    out = paged.decode()
    k, v = paged.caches.nan_to_num_()  # flash-attn reads after a context's end
    theirs = flash_attn.flash_attn_with_kvcache(
        paged.q[:, None], k, v, cache_seqlens=paged.lens, block_table=paged.tables,
        softmax_scale=paged.shape.scale, causal=True,
    )  # fmt: skip
    assert_near(theirs[:, 0].contiguous(), paged.twin_decode, paged)
    assert_near(out, paged.twin_decode, paged)

    paged = Paged(Shape(*LARGE_PREFILLS["chunks"], **options), "cuda")
    assert paged.shape.queries
    out = paged.prefill(use_cache=True)
    k, v = paged.caches.nan_to_num_()
    theirs = flash_attn.flash_attn_varlen_func(
        paged.q, k, v, paged.cu_q, paged.cu_k, max(paged.shape.queries),
        max(paged.shape.contexts), softmax_scale=paged.shape.scale, causal=True,
        block_table=paged.tables,
    )  # fmt: skip
    assert_near(theirs, paged.twin_prefill, paged)
    assert_near(out, paged.twin_prefill, paged)
