"""Norm, activation and norm_rope_store of the Triton and CPU rooms, against their twins.

Triton's kernels run on a device, or interpreted where there is none.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from conftest import kernel_settings
from hypothesis import assume, example, given
from hypothesis import strategies as st

from nanovllm.kernels.cpu.table import cpu_kernels
from nanovllm.kernels.kv_layer import CODES, SCALES, KVLayer
from nanovllm.kernels.plain.decode_attention import gather_blocks
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.kernels.triton.table import triton_kernels

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-6
FLOAT32_SLACK = 2.0**-20  # sums in another order, fused multiply-adds, another exponential


@dataclass(frozen=True)
class Implementation:
    """Kernels, the device of their tensors, and their types."""

    kernels: Kernels
    device: str
    dtypes: list[torch.dtype]


@pytest.fixture(scope="session")
def on_triton(kernel_device: str) -> Implementation:
    return Implementation(triton_kernels(), kernel_device, DTYPES)


@pytest.fixture(scope="session")
def compiled(compiler: None) -> Implementation:
    return Implementation(cpu_kernels(), "cpu", DTYPES[:2])


@pytest.fixture(scope="session", params=["on_triton", "compiled"])
def tested(request: pytest.FixtureRequest) -> Implementation:
    found: Implementation = request.getfixturevalue(request.param)
    return found


def assert_rounded_alike(
    out: torch.Tensor, expected: torch.Tensor, slack: torch.Tensor | float = 0.0
) -> None:
    """Both computed in float32 and rounded once: rarely to neighbouring numbers, never further.

    Float32's last bits move a value over the boundary between two numbers of 16 bits about once in
    a thousand times; a rounding too many, or too few, does it in every fourth. `slack` is for
    values that were made of such ones.
    """
    assert out.dtype == expected.dtype and out.shape == expected.shape and out.is_contiguous()
    info = torch.finfo(out.dtype)
    same = out == expected  # infinities too
    bound = max(info.eps, FLOAT32_SLACK) * expected.float().abs() + info.smallest_normal * info.eps
    close = (out.float() - expected.float()).abs() <= bound + slack
    assert bool((same | close).all()), f"differ by {float((out - expected).float().abs().max())}"
    if out.dtype != torch.float32:
        assert int((~same).sum()) <= 8 + out.numel() // 100, (
            "rounded more often, or less, than once"
        )


@dataclass(frozen=True)
class Rows:
    """Rows of one size; with `strided`, a view into wider ones."""

    rows: int
    size: int
    dtype: torch.dtype = torch.bfloat16
    strided: bool = False
    scale: float = 1.0
    seed: int = 0

    def make(self, device: str, part: int = 0) -> torch.Tensor:
        """Random rows, the first one zeros; `part` makes a call's inputs differ."""
        torch.manual_seed(self.seed + part)
        wide = torch.randn(self.rows, self.size + (3 + part if self.strided else 0)) * self.scale
        wide[0] = 0
        x = wide.to(dtype=self.dtype, device=device)[:, -self.size :]
        assert x.stride(0) > self.size or not self.strided
        return x


ROWS = st.builds(
    Rows,
    rows=st.integers(1, 40),
    size=st.sampled_from([1, 2, 80, 128, 1000, 1024, 1536, 3072, 5120]),
    dtype=st.sampled_from(DTYPES),
    strided=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    seed=st.integers(0, 2**31),
)


def make_weight(size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.empty(size).uniform_(0.5, 1.5).to(dtype=dtype, device=device)


def assert_norms_as_its_twin(shape: Rows, tested: Implementation, wide: bool = False) -> None:
    kernels, device = tested.kernels, tested.device
    x, residual = shape.make(device), shape.make(device, part=1)
    weight = make_weight(shape.size, torch.float32 if wide else shape.dtype, device)
    before = [t.clone() for t in (x, residual, weight)]
    assert_rounded_alike(kernels.rms_norm(x, weight, EPS), PLAIN.rms_norm(x, weight, EPS))
    normed, total = kernels.add_rms_norm(x, residual, weight, EPS)
    expected, expected_total = PLAIN.add_rms_norm(x, residual, weight, EPS)
    assert total.is_contiguous() and torch.equal(total, expected_total), "the sum is exact"
    assert_rounded_alike(normed, expected)
    assert all(map(torch.equal, before, (x, residual, weight))), "inputs were changed"


@pytest.mark.slow
@kernel_settings(60)
@given(ROWS, st.booleans())
@example(Rows(1, 1), False)
@example(Rows(40, 3072, torch.float16, strided=True), False)
@example(Rows(40, 640, strided=True), True)
def test_norm_equals_its_twin(tested: Implementation, shape: Rows, wide: bool) -> None:
    """With weights of the type of the rows, or of float32."""
    assume(shape.dtype in tested.dtypes)
    assert_norms_as_its_twin(shape, tested, wide)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [80, 1024])
def test_a_norm_before_the_sum_is_that_of_two_kernels(
    size: int, dtype: torch.dtype, on_triton: Implementation
) -> None:
    """It is rounded between them, as theirs is."""
    shape, kernels = Rows(5, size, dtype), on_triton.kernels
    x, residual = shape.make(on_triton.device), shape.make(on_triton.device, part=1)
    inner, weight = (make_weight(size, torch.float32, on_triton.device) for _ in range(2))
    normed, total = kernels.add_normed(x, inner, EPS, residual, weight, EPS)
    expected, expected_total = kernels.add_rms_norm(
        kernels.rms_norm(x, inner, EPS), residual, weight, EPS
    )
    torch.testing.assert_close(total, expected_total)
    torch.testing.assert_close(normed, expected)
    plain, plain_total = PLAIN.add_normed(x, inner, EPS, residual, weight, EPS)
    torch.testing.assert_close(total, plain_total)
    torch.testing.assert_close(normed, plain)


def test_norm_squares_in_float32(on_triton: Implementation) -> None:
    """65,504 is float16's largest: the square of 300 is more."""
    x = torch.full((2, 80), 300.0, dtype=torch.float16, device=on_triton.device)
    ones = torch.ones_like(x)
    assert torch.equal(on_triton.kernels.rms_norm(x, ones[0], EPS), ones)
    normed, total = on_triton.kernels.add_rms_norm(x, x, ones[0], EPS)
    assert torch.equal(normed, ones) and torch.equal(total, 2 * x)


def assert_activates_as_its_twin(name: str, shape: Rows, tested: Implementation) -> None:
    x = shape.make(tested.device)
    before = x.clone()
    out, expected = getattr(tested.kernels, name)(x), getattr(PLAIN, name)(x)
    gate, up = x.chunk(2, dim=-1)
    # `silu(gate)` is rounded to the type before the product, and may have gone to its neighbour;
    # where it is a subnormal number, neighbours are far apart for their size. A GPU takes exp(g) by
    # exp2(g * log2(e)), whose product is rounded: g times that is the error of the exponential.
    info = torch.finfo(shape.dtype)
    slack = info.eps * (expected.float().abs() + info.smallest_normal * up.float().abs())
    slack += gate.float().abs() * 2.0**-22 * expected.float().abs()
    if name == "gelu_and_mul":  # the twin adds 1 to a tanh near -1, whose last bits are then lost
        lost = gate.float().abs() * up.float().abs() * 2.0**-23
        bound = 2 * slack + lost + info.smallest_normal * info.eps
        assert bool(((out - expected).float().abs() <= bound)[gate < -2].all())
        out, expected = out.where(gate >= -2, 0), expected.where(gate >= -2, 0)
        slack += lost
    assert_rounded_alike(out, expected, slack)
    assert torch.equal(x, before), "the input was changed"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
@kernel_settings(60)
@given(ROWS.filter(lambda shape: shape.size % 2 == 0))
@example(Rows(1, 2))
@example(Rows(40, 2 * 3072, torch.float16, strided=True))
def test_activation_equals_its_twin(tested: Implementation, name: str, shape: Rows) -> None:
    assume(shape.dtype in tested.dtypes)
    assert_activates_as_its_twin(name, shape, tested)


def test_activation_of_a_huge_gate_is_finite(tested: Implementation) -> None:
    """exp(300) is infinite in float32; at -300, silu must be 0 and not inf / inf."""
    for dtype in tested.dtypes:
        gate = torch.tensor([[-300.0, 300.0, -88.8, 0.0]], dtype=dtype, device=tested.device)
        up = torch.full_like(gate, 2.0)
        expected = torch.tensor([[0.0, 600.0, 0.0, 0.0]], dtype=dtype, device=tested.device)
        for activate in (tested.kernels.silu_and_mul, tested.kernels.gelu_and_mul):
            out = activate(torch.cat([gate, up], dim=1))
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_16_bit_gate_opens_as_in_plain_pytorch(
    tested: Implementation, dtype: torch.dtype
) -> None:
    """Gates are a part of longer rows. On a GPU, results are equal to the last bit."""
    if dtype not in tested.dtypes:
        pytest.skip("not a type of these kernels")
    codes = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    gates = codes.view(dtype).view(32, 2048).nan_to_num(nan=1.0).to(tested.device)
    gate = torch.cat([gates, gates], dim=1)[:, 7 : 7 + 2048]
    x = torch.randn(32, 2048, generator=torch.Generator().manual_seed(0)).to(gate)
    expected = PLAIN.sigmoid_and_mul(x.clone(), gate)
    out = tested.kernels.sigmoid_and_mul(x, gate)
    assert out is x
    if tested.device == "cuda":
        assert torch.equal(out, expected)
    else:  # NumPy's exponential
        torch.testing.assert_close(out, expected, rtol=torch.finfo(dtype).eps, atol=1e-7)
        assert (out != expected).float().mean() < 1e-3


@dataclass(frozen=True)
class Heads:
    """A step's tokens, some of which have no slot, with their heads and the caches."""

    has_slot: list[bool]
    kv_heads: int
    group: int
    head_dim: int
    norm: bool = True
    rotated: float = 1.0  # the part of a head that is
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    strided: bool = False
    scale: float = 1.0
    quantized: bool = False
    many: bool = False  # take the grid of a step with many tokens
    wide: bool = False  # weights in float32
    seed: int = 0


HEADS = st.builds(
    Heads,
    has_slot=st.lists(st.sampled_from([True, True, False]), min_size=1, max_size=8),
    kv_heads=st.sampled_from([1, 2, 3, 4, 8]),
    group=st.sampled_from([1, 2, 4, 7]),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    norm=st.booleans(),
    rotated=st.sampled_from([1.0, 1.0, 0.75, 0.5, 0.25]),
    block_size=st.sampled_from([16, 48, 256]),
    dtype=st.sampled_from(DTYPES),
    strided=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    quantized=st.booleans(),
    many=st.booleans(),
    wide=st.booleans(),
    seed=st.integers(0, 2**31),
).filter(lambda shape: shape.kv_heads * shape.group <= 32)


def assert_norms_rotates_and_stores_as_its_twin(
    shape: Heads, tested: Implementation, cached: bool = True
) -> None:
    """Compares all of the caches' memory, and a block before and after them."""
    device = tested.device
    tokens, num_kv, head_dim = len(shape.has_slot), shape.kv_heads, shape.head_dim
    num_q = num_kv * shape.group
    num_heads = num_q + 2 * num_kv
    fused = Rows(
        tokens, num_heads * head_dim, shape.dtype, shape.strided, shape.scale, shape.seed
    ).make(device)
    qkv = fused.unflatten(1, (num_heads, head_dim))
    rotated = int(head_dim * shape.rotated)
    angles = torch.rand(tokens, rotated // 2) * 1000
    table = torch.stack([angles.cos(), angles.sin()], dim=1).to(device)
    rope = cos, sin = table.unsqueeze(2).unbind(1)
    of_norms = torch.float32 if shape.wide else shape.dtype
    norms = [make_weight(head_dim, of_norms, device) for _ in range(2)]
    weights = (norms[0], norms[1]) if shape.norm else None
    slots, blocks = torch.full((tokens,), -1), 0
    if cached:
        blocks = tokens // shape.block_size + 3
        slots = torch.randperm(blocks * shape.block_size)[:tokens]
        slots[~torch.tensor(shape.has_slot)] = -1
    caches = torch.randn(2, 1 + blocks + 1, shape.block_size, num_kv, head_dim)
    caches = caches.to(device, CODES if shape.quantized else shape.dtype)
    scales = torch.rand(2, 1 + blocks + 1, num_kv, shape.block_size).to(device, SCALES)
    slots = slots.to(device)
    inputs = (qkv, cos, sin, *norms, slots)
    before = [t.clone() for t in inputs]
    expected_caches, expected_scales = caches.clone(), scales.clone()

    def call(
        function: Any, caches: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        k_cache, v_cache = caches[:, 1:-1]
        kv = KVLayer(k_cache, v_cache, 1.0)
        if shape.quantized:
            kv = replace(kv, k_scales=scales[0, 1:-1], v_scales=scales[1, 1:-1])
        q, k, v = function(qkv, num_kv, rope, weights, EPS, kv, slots)
        return q, k, v

    with pytest.MonkeyPatch.context() as patch:
        if shape.many and tested.kernels.name == "Triton":
            patch.setattr("nanovllm.kernels.triton.attention.norm_rope_store.FEW_TOKENS", 0)
        q, k, v = call(tested.kernels.norm_rope_store, caches, scales)
    twins = call(PLAIN.norm_rope_store, expected_caches, expected_scales)

    # Rounding of a pair's norms, then of their products; sums that cancel leave it as it was.
    eps = torch.finfo(shape.dtype).eps if shape.norm else FLOAT32_SLACK
    for out, twin in ((q, twins[0]), (k, twins[1])):
        turned, rest = twin.float().tensor_split([rotated], dim=2)
        pair = turned.unflatten(2, (2, -1)).norm(dim=2)
        slack = max(eps, FLOAT32_SLACK) * 2 * torch.cat([pair, pair, rest.abs()], dim=2)
        if shape.quantized and out is k:  # rarely another code, or another scale
            step = 2.0**-3 * twin.float().abs() + 2.0**-14 * twin.float().abs().amax(-1, True)
            assert bool(((out.float() - twin.float()).abs() <= step + slack).all())
            assert float((out != twin).float().mean()) <= 0.02 + 8 / out.numel() + eps * 8
        else:
            assert_rounded_alike(out, twin, slack)
    if not shape.quantized:
        assert v.data_ptr() == qkv[:, num_q + num_kv :].data_ptr(), "values are copied"
    assert torch.equal(v, twins[2])
    if cached:
        kept = slots >= 0
        stored = slots[kept]
        held = gather_blocks(
            KVLayer(*expected_caches, 1.0, None, *(expected_scales if shape.quantized else ())),
            torch.arange(blocks + 2, device=device)[None, 1:-1], shape.dtype,
        )  # fmt: skip
        assert torch.equal(held[1][0].transpose(0, 1)[stored], v[kept]), "the twin stores no values"
        # Attention and the cache get the same keys.
        if shape.quantized:
            kv = KVLayer(*caches, 1.0, None, *scales)
            rows = torch.arange(blocks + 2, device=device)[None, 1:-1]
            keys = gather_blocks(kv, rows, shape.dtype)[0][0].transpose(0, 1)
            assert torch.equal(keys[stored], k[kept])
            at = stored // shape.block_size + 1, slice(None), stored % shape.block_size
            expected_scales[0][at] = scales[0][at]
            k_rows, expected_rows = (
                x[0, 1:-1].flatten(0, 1).view(torch.uint8) for x in (caches, expected_caches)
            )
            expected_rows[stored] = k_rows[stored]
        else:
            expected_caches[0, 1:-1].flatten(0, 1)[stored] = k[kept]
    same = [
        torch.equal(*(x[i].view(torch.uint8) for x in (caches, expected_caches))) for i in (0, 1)
    ]
    assert same == [True, True], "stored keys or values differ"
    assert torch.equal(scales, expected_scales), "stored scales differ"
    assert all(map(torch.equal, before, inputs)), "inputs were changed"


@pytest.mark.slow
@kernel_settings(40)
@given(HEADS, st.sampled_from([True, True, True, False]))
@example(Heads([True], 1, 1, 64), True)
@example(Heads([True], 1, 1, 80, norm=False), False)
@example(Heads([True, False], 8, 3, 128, norm=False, rotated=0.75), True)
@example(Heads([True] * 3, 2, 2, 80, rotated=0.25, dtype=torch.float32), True)
@example(Heads([False] * 5, 4, 7, 128, dtype=torch.float16, strided=True), True)
@example(Heads([True, False] * 20, 1, 32, 256, dtype=torch.float32, many=True), True)
@example(Heads([True, False] * 20, 8, 2, 128, quantized=True), True)
@example(Heads([True, False] * 20, 1, 4, 256, wide=True), True)
@example(Heads([True, False] * 20, 1, 4, 256, wide=True, quantized=True), True)
@example(Heads([True] * 3, 2, 2, 128, norm=False, dtype=torch.float32, quantized=True), False)
def test_norm_rope_store_equals_its_twin(
    tested: Implementation, shape: Heads, cached: bool
) -> None:
    assume(shape.dtype in tested.dtypes)
    assert_norms_rotates_and_stores_as_its_twin(shape, tested, cached)


def test_norm_of_heads_squares_in_float32(on_triton: Implementation) -> None:
    """Without rotation, a head of equal numbers becomes ones, and zeros stay zeros."""
    device = on_triton.device
    qkv = torch.full((2, 3, 80), 300.0, dtype=torch.float16, device=device)
    qkv[1] = 0
    ones, zeros = (f(2, 1, 40, device=device) for f in (torch.ones, torch.zeros))
    weight = torch.ones(80, dtype=torch.float16, device=device)
    cache = qkv.new_zeros(1, 16, 1, 80)
    slots = torch.tensor([3, 4], device=device)
    q, k, _ = on_triton.kernels.norm_rope_store(
        qkv, 1, (ones, zeros), (weight, weight), EPS, KVLayer(cache, cache.clone(), 1.0), slots
    )
    for out in (q, k, cache[0, 3:5]):
        assert torch.equal(out[:, 0], torch.stack([weight, torch.zeros_like(weight)]))


# Hidden size, the feed-forward's size, key heads, query heads of each.
MODELS = {"Qwen3-0.6B": (1024, 3072, 8, 2), "Qwen3-8B": (4096, 12288, 8, 4)}


@pytest.mark.cuda
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tokens", [1, 64, 256, 16384])
def test_kernels_equal_their_twins_in_a_model(
    tokens: int, model: str, on_triton: Implementation
) -> None:
    assert_as_their_twins_in_a_model(tokens, model, on_triton)


@pytest.mark.parametrize("tokens", [1, 64, 300])
def test_cpu_kernels_equal_their_twins_in_a_model(tokens: int, compiled: Implementation) -> None:
    """On two threads, which share the larger of these."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_as_their_twins_in_a_model(tokens, "Qwen3-0.6B", compiled)
    finally:
        torch.set_num_threads(before)


def assert_as_their_twins_in_a_model(tokens: int, model: str, tested: Implementation) -> None:
    hidden, intermediate, kv_heads, group = MODELS[model]
    assert_norms_as_its_twin(Rows(tokens, hidden), tested)
    assert_activates_as_its_twin("silu_and_mul", Rows(tokens, 2 * intermediate), tested)
    has_slot = [i % 5 != 3 for i in range(tokens)]
    for norm in (True, False):
        shape = Heads(has_slot, kv_heads, group, 128, norm, block_size=256)
        assert_norms_rotates_and_stores_as_its_twin(shape, tested)
