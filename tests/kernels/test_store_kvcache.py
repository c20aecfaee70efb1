"""The Triton store against its twin: on a device, or interpreted where there is none."""

from dataclasses import dataclass

import pytest
import torch
from conftest import kernel_settings
from hypothesis import example, given
from hypothesis import strategies as st

from nanovllm.kernels.table import PLAIN

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """A step's tokens, some of which have no slot, and the cache that they go to."""

    has_slot: list[bool]
    heads: int
    head_dim: int
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    strided: bool = False
    seed: int = 0

    def inputs(self, device: str) -> Inputs:
        """Key, value, both caches full of other numbers, and slots in random order.

        A block before and after the caches shows writes outside of them.
        """
        torch.manual_seed(self.seed)
        tokens, heads, head_dim = len(self.has_slot), self.heads, self.head_dim
        options = {"dtype": self.dtype, "device": device}
        if self.strided:  # views into one tensor: neither tokens nor heads of a view adjoin
            fused = torch.randn(tokens, 3 * heads + 2, 2 * head_dim).to(**options)
            key = fused[:, 1 : heads + 1, :head_dim]
            value = fused[:, heads::2, head_dim:][:, :heads]
        else:
            key, value = (torch.randn(tokens, heads, head_dim).to(**options) for _ in range(2))
        blocks = tokens // self.block_size + 3
        caches = torch.randn(2, 1 + blocks + 1, self.block_size, heads, head_dim).to(**options)
        slots = torch.randperm(blocks * self.block_size)[:tokens]
        slots[~torch.tensor(self.has_slot)] = -1
        return key, value, caches, slots.to(device)


SHAPES = st.builds(
    Shape,
    has_slot=st.lists(st.sampled_from([True, True, False]), min_size=1, max_size=40),
    heads=st.integers(1, 16),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    block_size=st.sampled_from([16, 32, 48, 256]),
    dtype=st.sampled_from(DTYPES),
    strided=st.booleans(),
    seed=st.integers(0, 2**31),
)


def assert_stores_as_its_twin(inputs: Inputs) -> None:
    """Compares all of the memory: slots that are not named are unchanged."""
    from nanovllm.kernels.triton.store_kvcache import store_kvcache

    key, value, caches, slots = inputs
    expected = caches.clone()
    before = [x.clone() for x in (key, value, slots)]
    store_kvcache(key, value, *caches[:, 1:-1], slots)
    PLAIN.store_kvcache(key, value, *expected[:, 1:-1], slots)
    assert torch.equal(caches[0], expected[0]), "keys differ"
    assert torch.equal(caches[1], expected[1]), "values differ"
    assert all(map(torch.equal, before, (key, value, slots))), "inputs were changed"


@pytest.mark.slow
@kernel_settings(100)
@given(SHAPES)
@example(Shape([True], 1, 64))
@example(Shape([False], 1, 80, strided=True))
@example(Shape([False] * 5, 3, 128))
@example(Shape([True] * 7, 1, 80, dtype=torch.float32, strided=True))
@example(Shape([True, False] * 20, 16, 256, dtype=torch.float16))
def test_the_kernel_equals_its_twin(kernel_device: str, shape: Shape) -> None:
    assert_stores_as_its_twin(shape.inputs(kernel_device))


@pytest.mark.cuda
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [512, 16384])
def test_the_kernel_equals_its_twin_in_a_large_step(
    tokens: int, dtype: torch.dtype, strided: bool
) -> None:
    shape = Shape([i % 5 != 3 for i in range(tokens)], 8, 128, 256, dtype, strided)
    assert_stores_as_its_twin(shape.inputs("cuda"))


def test_slots_beyond_32_bits_do_not_wrap_around(
    kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one byte for each element, few of them touched: gigabytes of addresses, not memory."""
    from triton.runtime.interpreter import GridExecutor

    from nanovllm.kernels.triton.store_kvcache import store_kvcache

    # The interpreter copies arguments back to the device; on the CPU they never left it, and the
    # copy would touch every page.
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *args: None)
    heads, head_dim = 2, 64
    num_slots = 2**31 // (heads * head_dim) + 16
    num_bytes = num_slots * heads * head_dim
    assert num_bytes > 2**31
    # A write that wraps around is before the cache, in memory of this test.
    memory = torch.empty(2**31 + num_bytes, dtype=torch.uint8, device=kernel_device)
    cache = memory[2**31 :].view(-1, 16, heads, head_dim)
    slots = torch.tensor([0, num_slots - 1, -1, num_slots - 17, num_slots - 16, 3])
    key = torch.randint(1, 255, (len(slots), heads, head_dim), dtype=torch.uint8)
    slots, key = slots.to(kernel_device), key.to(kernel_device)
    rows = cache.flatten(0, 1)
    around = [1, 2, 4, num_slots - 18, num_slots - 15, num_slots - 2]
    rows[around] = 0
    # Keys and values go to one cache, to save memory.
    store_kvcache(key, key, cache, cache, slots)
    kept = slots >= 0
    assert torch.equal(rows[slots[kept]], key[kept])
    assert not rows[around].any()


@pytest.mark.cuda
def test_slots_beyond_32_bits_do_not_wrap_around_in_a_real_cache() -> None:
    from nanovllm.kernels.triton.store_kvcache import store_kvcache

    num_slots, heads, head_dim = 2**31 // (8 * 128) + 16, 8, 128
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("the device has less than 6 GiB to spare")
    cache = torch.zeros(num_slots // 16, 16, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([num_slots - 1, 0, -1, num_slots - 17], device="cuda")
    key = torch.randn(4, heads, head_dim, device="cuda").bfloat16()
    store_kvcache(key, key, cache, cache, slots)
    kept = slots >= 0
    rows = cache.flatten(0, 1)
    assert torch.equal(rows[slots[kept]], key[kept])
    assert int(rows.any(-1).any(-1).sum()) == 3


def test_a_cache_that_is_not_contiguous_is_refused(kernel_device: str) -> None:
    from nanovllm.kernels.triton.store_kvcache import store_kvcache

    key, value, (k_cache, v_cache), slots = Shape([True] * 3, 2, 64).inputs(kernel_device)
    for broken in (
        (key.transpose(1, 2), value, k_cache, v_cache),
        (key, value.transpose(1, 2), k_cache, v_cache),
        (key, value, k_cache.transpose(0, 1), v_cache),
        (key, value, k_cache, v_cache.transpose(0, 1)),
    ):
        with pytest.raises(AssertionError):
            store_kvcache(*broken, slots)
