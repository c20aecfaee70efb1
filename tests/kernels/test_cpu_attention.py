"""The CPU's compiled attention against its twins, with the shapes and NaNs of Triton's tests."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from selection import examples
from test_attention_kernels import (
    BF16,
    FP32,
    Paged,
    Shape,
    assert_decodes_as_its_twin,
    assert_prefills_as_its_twin,
    batches,
    uninitialized_memory_is_nan,  # noqa: F401  (for this module too)
)

from nanovllm.kernels.cpu import attention
from nanovllm.kernels.cpu.decode_attention import decode_attention, plan_decode
from nanovllm.kernels.cpu.prefill_attention import plan_prefill, prefill_attention

pytestmark = pytest.mark.usefixtures("one_thread", "compiler")

SETTINGS = settings(max_examples=examples(80), deadline=None)


class Compiled(Paged):
    """The same tensors, on the CPU's kernels."""

    def heads(self) -> tuple[int, int]:
        return self.shape.group, self.shape.head_dim

    def decode(self, layers: int = 1) -> torch.Tensor:
        plan = plan_decode(self.lens, self.tables, *self.heads())
        out = decode_attention(self.q, self.kernel_layer(), plan)
        assert not out.isnan().any(), "it read unowned memory, or did not write a result"
        return out

    def prefill(self, use_cache: bool) -> torch.Tensor:
        tables = self.tables if use_cache else None
        plan = plan_prefill(self.cu_q, self.cu_k, tables, *self.heads())
        if use_cache:
            unread = torch.full_like(self.k, torch.nan)
            keys = (unread, unread, self.kernel_layer())
        else:
            keys = (self.k, self.v, self.layer(torch.empty(0), torch.empty(0)))
        return prefill_attention(self.q, *keys, plan)


HEADS = dict(
    kv_heads=st.integers(1, 4),
    group=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16, 24]),
    head_dim=st.sampled_from([8, 40, 64, 80, 96, 128, 256, 512]),
    block_size=st.sampled_from([1, 2, 7, 16, 48, 256]),
    dtype=st.sampled_from([FP32, FP32, BF16]),
    strided=st.booleans(),
    window=st.none() | st.integers(1, 40) | st.integers(1, 300),
    quantized=st.booleans(),
    soft_cap=st.sampled_from([None, None, 0.5, 3.0, 50.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 2**31),
)
SPLITS = st.sampled_from([32, 64, 96, 1024])


@SETTINGS
@given(st.builds(Shape, contexts=batches(), **HEADS), SPLITS)
@example(Shape([0, 1, 31, 32, 33, 64, 65], block_size=1), 1024)
@example(Shape([700, 0, 40], group=16, dtype=BF16), 32)
@example(Shape([200], group=24, head_dim=512), 32)
@example(Shape([700, 0, 40, 31, 33], window=33, block_size=1), 1024)
@example(Shape([700, 64, 65], group=24, window=1, block_size=7), 32)
@example(Shape([700, 64, 65], group=2, window=100), 32)
@example(Shape([700, 0, 64, 65], group=2, head_dim=128, dtype=BF16, quantized=True), 1024)
@example(Shape([700, 0, 64, 65], group=24, head_dim=40, block_size=7, quantized=True), 32)
@example(Shape([700, 0, 64, 65], group=2, soft_cap=2.0, quantized=True), 32)
@example(Shape([700, 0, 64, 65], group=24, soft_cap=2.0, window=100), 32)
@example(Shape([700, 0, 64, 65], group=2, sinks=True, quantized=True), 32)
@example(Shape([700, 0, 64, 65], group=8, window=100, sinks=True), 32)
def test_decode_equals_its_twin(shape: Shape, split: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SPLIT_KEYS", split)
        assert_decodes_as_its_twin(shape, "cpu", Compiled)


@st.composite
def prefills(draw: st.DrawFn, cached: bool) -> Shape:
    """New tokens after cached ones; some sequences have one, as in a mixed step."""
    queries = draw(st.lists(st.integers(1, 5) | st.integers(1, 90), min_size=1, max_size=6))
    prefix = st.integers(0, 20) | st.integers(0, 150)
    before = [draw(prefix) if cached else 0 for _ in queries]
    contexts = [old + new for old, new in zip(before, queries, strict=True)]
    heads = HEADS if cached else HEADS | {"quantized": st.just(False)}
    return draw(st.builds(Shape, contexts=st.just(contexts), queries=st.just(queries), **heads))


@SETTINGS
@given(prefills(cached=False))
@example(Shape([1], [1], 1, 1, 8))
@example(Shape([200, 1, 65, 64, 33], [200, 1, 65, 64, 33], group=7, dtype=BF16))
@example(Shape([200, 1, 65, 64, 33], [200, 1, 65, 64, 33], window=1))
@example(Shape([200, 1, 65, 64, 33], [200, 1, 65, 64, 33], group=7, window=33))
def test_fresh_prefill_equals_its_twin(shape: Shape) -> None:
    assert_prefills_as_its_twin(shape, False, "cpu", Compiled)


@SETTINGS
@given(prefills(cached=True), SPLITS)
@example(Shape([97, 200, 31, 33, 153], [1, 200, 16, 17, 3], group=8, head_dim=128), 32)
@example(Shape([97, 200, 31, 33, 153], [1, 200, 16, 17, 3], block_size=1, window=9), 32)
@example(Shape([200], [16], group=1, window=2), 32)  # parts of which a query sees nothing
@example(Shape([40], [8], group=2), 32)  # the most rows without a tile
@example(Shape([40], [9], group=2), 32)
@example(Shape([97, 200, 31, 33], [1, 200, 16, 17], head_dim=128, quantized=True), 32)
@example(Shape([97, 200, 31, 33], [1, 200, 16, 17], quantized=True, soft_cap=2.0), 32)
@example(Shape([97, 200, 31, 33], [1, 200, 16, 17], group=8, window=40, sinks=True), 32)
def test_chunks_and_prefixes_equal_their_twin(shape: Shape, split: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SPLIT_KEYS", split)
        assert_prefills_as_its_twin(shape, True, "cpu", Compiled)


@pytest.mark.parametrize(
    ("value_dim", "is_latent", "most"), [(128, False, 33), (512, False, 65), (512, True, 65)]
)
def test_a_state_has_memory_for_the_columns_of_a_value(
    value_dim: int, is_latent: bool, most: int
) -> None:
    """In KiB: not for those of the widest tile, whose vectors may have 16 numbers."""
    size = attention.slot_bytes(value_dim, is_latent)
    assert size % 64 == 0 and size <= most << 10


@pytest.mark.parametrize("window", [None, 1500])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("group", [2, 16, 24])
def test_a_decode_does_not_depend_on_neighbours_or_threads(
    group: int, dtype: torch.dtype, window: int | None
) -> None:
    """To the last bit: 2,500 keys are split in any batch, and on one thread too."""
    contexts = [1, 2500, 33, 0, 1024, 1025, 64]
    paged = Compiled(Shape(contexts, group=group, dtype=dtype, window=window), "cpu")
    together = paged.decode()
    torch.set_num_threads(2)
    assert torch.equal(paged.decode(), together)
    torch.set_num_threads(1)
    for row in range(len(contexts)):
        alone = Compiled(paged.shape, "cpu")
        for name in ("q", "lens", "tables"):
            setattr(alone, name, getattr(paged, name)[row : row + 1])
        alone.caches = paged.caches
        assert torch.equal(alone.decode(), together[row : row + 1])


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_attention_does_not_depend_on_where_a_chunk_begins(
    dtype: torch.dtype, window: int | None
) -> None:
    """Lanes of a tile are independent: chunks of one prompt agree to the last bit."""
    whole = Compiled(Shape([300], [300], group=4, dtype=dtype, window=window), "cpu")
    expected = whole.prefill(use_cache=True)
    assert torch.equal(whole.prefill(use_cache=False), expected)
    for start in (0, 7, 130, 295):
        end = min(start + 64, 300)
        chunk = Compiled(replace(whole.shape, contexts=[end], queries=[end - start]), "cpu")
        chunk.caches, chunk.tables = whole.caches, whole.tables
        chunk.q, chunk.k = whole.q[start:end], whole.k[start:end]
        if end - start > 4:  # enough rows for tiles
            assert torch.equal(chunk.prefill(use_cache=True), expected[start:end])


def test_tables_are_not_read_after_a_context() -> None:
    """Tables are as wide as the longest possible context, and full of an earlier step's ids."""
    paged = Compiled(Shape([3, 70, 20], block_size=4), "cpu")
    expected = paged.decode()
    stale = torch.full((3, 200), 2**31 - 1, dtype=torch.int32)
    for row, length in enumerate([3, 70, 20]):
        count = -(-length // 4)
        stale[row, :count] = paged.tables[row, :count]
    paged.tables = stale
    assert torch.equal(paged.decode(), expected)


def test_weights_are_not_rounded_to_16_bits() -> None:
    """257 equal values of 1: weights of 1/257 that bf16 rounded would not add up to 1 again."""
    paged = Compiled(Shape([257], dtype=BF16), "cpu")
    paged.caches[1] = 1.0
    assert torch.equal(paged.decode(), torch.ones_like(paged.q))
