"""The Triton store against its twin: on a device, or interpreted where there is none."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import kernel_settings
from hypothesis import example, given
from hypothesis import strategies as st

from nanovllm.kernels.kv_layer import SCALES, KVLayer
from nanovllm.kernels.plain.kv_codes import quantize
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


def layer(caches: torch.Tensor, scales: torch.Tensor | None = None, **options: Any) -> KVLayer:
    """Without the first block and the last one, which show writes outside."""
    k_cache, v_cache = caches[:, 1:-1]
    k_scales, v_scales = (None, None) if scales is None else scales[:, 1:-1]
    return KVLayer(k_cache, v_cache, 1.0, None, k_scales, v_scales, **options)


def assert_stores_as_its_twin(inputs: Inputs) -> None:
    """Compares all of the memory: slots that are not named are unchanged."""
    from nanovllm.kernels.triton.attention.store_kvcache import store_kvcache

    key, value, caches, slots = inputs
    expected = caches.clone()
    before = [x.clone() for x in (key, value, slots)]
    k, v = store_kvcache(key, value, layer(caches), slots)
    assert k is key and v is value
    PLAIN.store_kvcache(key, value, layer(expected), slots)
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

    from nanovllm.kernels.triton.attention.store_kvcache import store_kvcache

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
    store_kvcache(key, key, KVLayer(cache, cache[:], 1.0), slots)
    kept = slots >= 0
    assert torch.equal(rows[slots[kept]], key[kept])
    assert not rows[around].any()


@pytest.mark.cuda
def test_slots_beyond_32_bits_do_not_wrap_around_in_a_real_cache() -> None:
    from nanovllm.kernels.triton.attention.store_kvcache import store_kvcache

    num_slots, heads, head_dim = 2**31 // (8 * 128) + 16, 8, 128
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("the device has less than 6 GiB to spare")
    cache = torch.zeros(num_slots // 16, 16, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([num_slots - 1, 0, -1, num_slots - 17], device="cuda")
    key = torch.randn(4, heads, head_dim, device="cuda").bfloat16()
    store_kvcache(key, key, KVLayer(cache, cache[:], 1.0), slots)
    kept = slots >= 0
    rows = cache.flatten(0, 1)
    assert torch.equal(rows[slots[kept]], key[kept])
    assert int(rows.any(-1).any(-1).sum()) == 3


@pytest.mark.parametrize("kernel", ["plain", "triton"])
def test_rows_that_are_keys_and_values_are_written_once(kernel: str, kernel_device: str) -> None:
    from nanovllm.kernels.triton.attention.store_kvcache import store_kvcache

    store = store_kvcache if kernel == "triton" else PLAIN.store_kvcache
    key, value, (cache, _), slots = Shape([True, False, True], 1, 40).inputs(kernel_device)
    store(key, value, KVLayer(cache, cache, 1.0, value_width=40), slots)
    kept = slots >= 0
    assert torch.equal(cache.flatten(0, 1)[slots[kept]], key[kept]), "the second one came last"


def test_a_cache_that_is_not_contiguous_is_refused(kernel_device: str) -> None:
    from nanovllm.kernels.triton.attention.store_kvcache import store_kvcache

    key, value, (k_cache, v_cache), slots = Shape([True] * 3, 2, 64).inputs(kernel_device)
    for k, v, *caches in (
        (key.transpose(1, 2), value, k_cache, v_cache),
        (key, value.transpose(1, 2), k_cache, v_cache),
        (key, value, k_cache.transpose(0, 1), v_cache),
        (key, value, k_cache, v_cache.transpose(0, 1)),
    ):
        with pytest.raises(AssertionError):
            store_kvcache(k, v, KVLayer(*caches, 1.0), slots)


# Codes


@dataclass(frozen=True)
class Codes(Shape):
    """Heads of any size, some of them zeros, that go to a quantized cache."""

    fixed_scales: tuple[float, float] | None = None
    cached: bool = True

    def store(self, function: Any, device: str) -> list[torch.Tensor]:
        """What it returns, and all of the memory afterwards."""
        key, value, caches, slots = self.inputs(device)
        sizes = torch.tensor([0.0, 1e-9, 0.01, 1.0, 300.0])[torch.randint(5, (len(key), 1, 1))]
        key, value = (x * sizes.to(x.device, x.dtype) for x in (key, value))
        codes = torch.zeros(caches.shape, dtype=torch.uint8, device=device)
        options: dict[str, Any] = dict(dtype=SCALES, device=device)
        scales = torch.zeros(*codes.shape[:2], self.heads, self.block_size, **options)
        if not self.cached:
            codes, scales = codes[:, :2], scales[:, :2]
        kv = layer(codes.view(torch.float8_e4m3fn), scales, fixed_scales=self.fixed_scales)
        return [*function(key, value, kv, slots), codes, scales]


@pytest.mark.slow
@kernel_settings(40)
@given(
    st.builds(
        Codes,
        has_slot=st.lists(st.sampled_from([True, True, False]), min_size=1, max_size=20),
        heads=st.integers(1, 8),
        head_dim=st.sampled_from([64, 80, 128]),
        block_size=st.sampled_from([1, 16, 48]),
        dtype=st.sampled_from(DTYPES),
        strided=st.booleans(),
        fixed_scales=st.sampled_from([None, (0.01, 0.003)]),
        cached=st.sampled_from([True, True, True, False]),
        seed=st.integers(0, 2**31),
    )
)
def test_the_kernel_stores_the_codes_of_its_twin(kernel_device: str, shape: Codes) -> None:
    """To the last bit, and returns what it stores."""
    from nanovllm.kernels.triton.attention.store_kvcache import store_kvcache

    out = shape.store(store_kvcache, kernel_device)
    assert all(map(torch.equal, out, shape.store(PLAIN.store_kvcache, kernel_device)))


def exact_codes() -> torch.Tensor:
    """All numbers of e4m3 from 0 upwards, in float64, made from their bits."""
    bits = torch.arange(0x7F)
    exponent, mantissa = bits // 8, (bits % 8).double() / 8
    return torch.where(exponent > 0, (1 + mantissa) * 2.0 ** (exponent - 7), mantissa * 2.0**-6)


def store_in_cpp(
    key: torch.Tensor, value: torch.Tensor, kv: KVLayer, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [T, KVH, D] by the kernel that also rotates keys, by an angle of 0."""
    from nanovllm.kernels.cpu.norm_rope_store import norm_rope_store

    cos, sin = torch.ones(len(key), 1, key.shape[2] // 2), torch.zeros(len(key), 1, 32)
    qkv = torch.cat([key, key, value], dim=1)
    _, k, v = norm_rope_store(qkv, key.shape[1], (cos, sin), None, 1e-6, kv, slots)
    return k, v


@pytest.mark.parametrize("room", ["plain", "triton", "C++"])
def test_codes_are_the_nearest_and_scales_the_least(
    room: str, request: pytest.FixtureRequest
) -> None:
    """By their definition: all numbers of e4m3, their midpoints and what is beside those."""
    numbers = exact_codes()
    middle = (numbers[1:] + numbers[:-1]) / 2
    eps = 2.0**-22
    x = torch.cat([numbers, middle, middle * (1 + eps), middle * (1 - eps)])
    x = torch.cat([x, -x]).float()
    heads = torch.cat([x, torch.full((-len(x) % 64,), 448.0)]).view(1, -1, 64).clone()
    heads[..., 0] = 448.0  # so that the scale is 1
    device, store = "cpu", PLAIN.store_kvcache
    if room == "triton":
        from nanovllm.kernels.triton.attention.store_kvcache import store_kvcache as store

        device = request.getfixturevalue("kernel_device")
    if room == "C++":
        request.getfixturevalue("compiler")
        store = store_in_cpp
    scales = torch.zeros(1, heads.shape[1], 16, dtype=SCALES, device=device)
    cache = torch.zeros(1, 16, *heads.shape[1:], device=device).to(torch.float8_e4m3fn)
    kv = KVLayer(cache, cache.clone(), 1.0, None, scales, scales.clone())
    slot = torch.tensor([5], device=device)
    for factor in (1.0, 2.0**-20, 2.0**30):
        out, _ = store(heads.to(device) * factor, heads.to(device), kv, slot)
        near = (heads.double()[..., None].abs() - numbers).abs()
        # Of two that are as near, the one with an even last bit.
        index = torch.where(near == near.amin(-1, keepdim=True), torch.arange(0x7F) % 2, 9).argmin(
            -1
        )
        expected = numbers[index].copysign(heads.double()) * factor
        assert torch.equal(out.double().cpu(), expected)
        assert bool((scales[0, :, 5].float() == factor).all())
        held = cache[0, 5].float() * scales[0, :, 5, None].float()
        assert torch.equal(held, out[0])
    for largest in (1.0, 3.0, 449.0, 1e-3, 5e4):
        _, (scale,) = quantize(torch.full((1, 64), largest))
        below = torch.nextafter(scale, torch.zeros_like(scale)).double()
        assert float(below) * 448 < largest <= float(scale.double()) * 448 * (1 + 2.0**-24)


@pytest.mark.parametrize("fixed", [None, (2.0**-6, 2.0**-6)])
@pytest.mark.parametrize("room", ["plain", "triton"])
def test_nan_and_infinity_stay_in_their_head(
    room: str, fixed: tuple[float, float] | None, request: pytest.FixtureRequest
) -> None:
    """With scales of the heads, and with fixed ones, with which infinity saturates."""
    device, store = "cpu", PLAIN.store_kvcache
    if room == "triton":
        from nanovllm.kernels.triton.attention.store_kvcache import store_kvcache as store

        device = request.getfixturevalue("kernel_device")
    key = torch.ones(3, 1, 64, device=device)
    key[0, 0, 3], key[1, 0, 3] = torch.nan, torch.inf
    empty = torch.zeros(0, 16, 1, 64, device=device).to(torch.float8_e4m3fn)
    scales = torch.zeros(0, 1, 16, dtype=SCALES, device=device)
    kv = KVLayer(empty, empty, 1.0, None, scales, scales, fixed_scales=fixed)
    out, _ = store(key, key, kv, torch.full((3,), -1, device=device))
    assert bool(out[0].isnan().all()) and bool(out[1].isnan().any()) == (fixed is None)
    torch.testing.assert_close(out[2], key[2], rtol=2.0**-4, atol=0)


def test_codes_of_fixed_scales_saturate() -> None:
    codes, scales = quantize(torch.tensor([[1.0, 2.0, -1e9, 0.0]]), 2.0**-8)
    assert codes.float().tolist() == [[256.0, 448.0, -448.0, 0.0]]
    assert scales.tolist() == [2.0**-8]
    assert quantize(torch.ones(1, 1, 1), 0.1)[1].item() == 0.10009765625, "rounded upwards"
