"""Attention over prompts on Hopper GPUs: when its kernel is used, and that it is right.

Gluon has no interpreter, so its results need the GPU. `test_ahead_of_time` compiles it without.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_attention_kernels import (
    BF16,
    FP16,
    FP32,
    Paged,
    Shape,
    assert_prefills_as_its_twin,
    uninitialized_memory_is_nan,  # noqa: F401  a fixture for all tests here too
)

from nanovllm.kernels.kv_layer import KVLayer

pytest.importorskip("triton.experimental.gluon")


@pytest.mark.parametrize(
    ("tokens", "sequences", "paged", "overlaps"),
    [
        (4096, 16, False, True), (4096, 17, False, False), (4095, 1, False, False),
        (2048, 1, True, True), (2048, 8, True, True), (2048, 9, True, False),
        (2047, 1, True, False), (16384, 64, False, True), (16384, 65, True, False),
    ],
)  # fmt: skip
def test_it_is_used_for_steps_of_long_sequences(
    monkeypatch: pytest.MonkeyPatch, tokens: int, sequences: int, paged: bool, overlaps: bool
) -> None:
    """The shapes for which it was measured. Others gain less than its launch costs, or lose."""
    from nanovllm.kernels.triton.attention import prefill_plan

    ends = torch.zeros(sequences + 1, dtype=torch.int32)
    tables = torch.zeros(sequences, 1, dtype=torch.int32) if paged else None
    for can in (True, False):
        monkeypatch.setattr(prefill_plan, "can_overlap", lambda device, can=can: can)
        plan = prefill_plan.plan_prefill(ends, ends, tables, tokens)
        assert plan.overlaps == (can and overlaps)


@pytest.mark.parametrize(
    ("version", "capability", "can"),
    [("3.6.0", 90, True), ("3.7.1", 90, True), ("3.5.1", 90, False), ("3.8.0", 90, False),
     ("3.7.1", 80, False), ("3.7.1", 120, False)],
)  # fmt: skip
def test_it_is_used_on_hopper_with_known_versions_of_gluon(
    monkeypatch: pytest.MonkeyPatch, version: str, capability: int, can: bool
) -> None:
    from nanovllm.kernels.triton import common

    monkeypatch.setattr(common, "INTERPRETED", False)
    monkeypatch.setattr(common, "capability", lambda device: capability)
    monkeypatch.setattr(common.triton, "__version__", version)
    assert common.can_overlap(torch.device("cpu")) == can


def layer(window: int | None = None, block_size: int = 64, scales: bool = False) -> KVLayer:
    caches = torch.empty(2, 3, block_size, 2, 128, dtype=BF16)
    return KVLayer(*caches, 0.1, window, *(caches.unbind(0) if scales else (None, None)))


def heads(
    group: int = 4, head_dim: int = 128, dtype: torch.dtype = BF16, room: int = 0
) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of a projection; with `room` its rows have more elements."""
    sizes = (2 * group, 2, 2)
    x = torch.empty(5, sum(sizes) * head_dim + room, dtype=dtype)[:, : sum(sizes) * head_dim]
    return x.unflatten(1, (-1, head_dim)).split(sizes, dim=1)


@pytest.mark.parametrize(
    ("inputs", "kv", "own", "paged"),
    [
        (heads(), layer(), True, True),
        (heads(dtype=FP16, head_dim=64), layer(), True, True),
        (heads(group=16), layer(block_size=256), True, True),
        (heads(), layer(block_size=16), True, False),
        (heads(), layer(block_size=96), True, False),
        (heads(), layer(scales=True), True, False),
        (heads(), layer(window=100), False, False),
        (heads(dtype=FP32), layer(), False, False),
        (heads(head_dim=80), layer(), False, False),
        (heads(head_dim=256), layer(), False, False),
        (heads(group=17), layer(), False, False),
        (heads(room=4), layer(), False, False),
        (tuple(x[..., ::2] for x in heads(head_dim=256)), layer(), False, False),
    ],
)  # fmt: skip
def test_it_fits_layers_that_the_accelerator_can_copy(
    inputs: tuple[torch.Tensor, ...], kv: KVLayer, own: bool, paged: bool
) -> None:
    """With the step's own keys, and with those of the cache."""
    from nanovllm.kernels.triton.attention.hopper_prefill import fits

    assert (fits(*inputs, kv, paged=False), fits(*inputs, kv, paged=True)) == (own, paged)


# On a Hopper GPU


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each launch of its kernel; the test needs one launch at least."""
    from nanovllm.kernels.triton.attention import hopper_prefill
    from nanovllm.kernels.triton.common import can_overlap

    if not can_overlap(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU, and a version of Triton that its kernel is written for")
    calls: list[int] = []
    kernel = hopper_prefill.hopper_prefill

    def counted(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(len(q))
        return kernel(q, *rest)

    monkeypatch.setattr(hopper_prefill, "hopper_prefill", counted)
    return calls


BATCHES = {
    "one token": ([1], [1]),
    "one tile": ([32], [32]),
    "ends around tiles": ([127, 128, 129, 255, 256, 257], [127, 128, 129, 255, 256, 257]),
    "ragged": ([300, 1, 64, 130, 1000, 129], [300, 1, 64, 130, 1000, 129]),
    "many sequences": ([1] * 70 + [33, 5, 900] + [3] * 150, [1] * 70 + [33, 5, 900] + [3] * 150),
    "cached": ([500, 1, 64, 129, 65, 2000], [1, 1, 64, 65, 64, 700]),
    "cached, parts": ([129, 191, 192, 193, 64, 65, 320], [1, 60, 64, 66, 1, 2, 200]),
    "long": ([3000, 2500], [1500, 2500]),
}


@pytest.mark.sampled(share=0.3)
@pytest.mark.cuda
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("name", BATCHES)
def test_it_equals_its_twin(hopper: list[int], name: str, group: int) -> None:
    contexts, queries = BATCHES[name]
    shape = Shape(contexts, queries, 2, group, 128, 64, BF16, overlaps=True)
    assert_prefills_as_its_twin(shape, True, "cuda")
    if contexts == queries:
        assert_prefills_as_its_twin(shape, False, "cuda")
    assert len(hopper) == 1 + (contexts == queries)


@pytest.mark.cuda
@pytest.mark.parametrize("strided", [True, False])
@pytest.mark.parametrize(
    ("head_dim", "dtype", "block_size"), [(64, BF16, 64), (64, FP16, 128), (128, FP16, 256)]
)
@pytest.mark.parametrize("name", ["ragged", "cached", "cached, parts"])
def test_other_heads_types_and_blocks_equal_their_twin(
    hopper: list[int], name: str, head_dim: int, dtype: torch.dtype, block_size: int, strided: bool
) -> None:
    contexts, queries = BATCHES[name]
    shape = Shape(contexts, queries, 8, 4, head_dim, block_size, dtype, strided, overlaps=True)
    assert_prefills_as_its_twin(shape, True, "cuda")
    if contexts == queries:
        assert_prefills_as_its_twin(shape, False, "cuda")
    assert hopper


@pytest.mark.cuda
@pytest.mark.parametrize("lens", [[8192], [1025] * 5, [600] * 16, [1024] * 4], ids=str)
def test_large_steps_equal_their_twin(hopper: list[int], lens: list[int]) -> None:
    """With programs that take one tile, and with those that take many."""
    shape = Shape(lens, lens, 8, 4, 128, 64, BF16, overlaps=True)
    for use_cache in (True, False):
        assert_prefills_as_its_twin(shape, use_cache, "cuda")
    assert len(hopper) == 2


@pytest.mark.cuda
@pytest.mark.parametrize("use_cache", [True, False])
def test_runs_give_equal_results(hopper: list[int], use_cache: bool) -> None:
    """A tile that is replaced while it is read differs from run to run."""
    lens = [300, 1, 64, 130, 1000, 129] * 8
    paged = Paged(Shape(lens, lens, 8, 4, 128, 64, BF16, overlaps=True), "cuda")
    first = paged.prefill(use_cache)
    assert all(torch.equal(paged.prefill(use_cache), first) for _ in range(30))
    assert len(hopper) == 31


@pytest.mark.cuda
def test_a_sequence_does_not_see_the_nan_of_its_neighbour(hopper: list[int]) -> None:
    """A tile of the step's own keys extends into the next sequence."""
    shape = Shape([200, 300], [200, 300], 2, 4, 128, 64, BF16, overlaps=True)
    paged = Paged(shape, "cuda")
    expected = paged.prefill(use_cache=False)[:200]
    paged.k[200:], paged.v[200:] = torch.nan, torch.nan
    assert torch.equal(paged.prefill(use_cache=False)[:200], expected)
    assert len(hopper) == 2


@pytest.mark.cuda
def test_a_layer_that_it_does_not_fit_takes_the_general_kernel(hopper: list[int]) -> None:
    """In one step with others: the plan has tiles for both."""
    shape = Shape([300, 129], [300, 129], 2, 4, 128, 64, BF16, overlaps=True)
    for other in (replace(shape, window=100), replace(shape, head_dim=80)):
        assert_prefills_as_its_twin(other, True, "cuda")
    assert not hopper
