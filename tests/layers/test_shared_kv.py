"""Layers that read the keys and values of another layer: as if they had computed them."""

from typing import Any

import pytest
import torch

from nanovllm.engine.cache.divide import divide
from nanovllm.engine.cache.pools import KVPool
from nanovllm.formats.format import PLAIN_FORMATS
from nanovllm.kernels.cpu.table import cpu_kernels
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.kernels.triton.table import triton_kernels
from nanovllm.layers.attention import Attention
from nanovllm.layers.backend import Backend, TorchBackend
from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.context import Context, attending
from nanovllm.layers.layer import Build, Layer
from nanovllm.layers.mixer import Mixer
from nanovllm.layers.proportional_rope import proportional_rope
from nanovllm.layers.ranks import ALONE
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.layers.shared_cache import SharedKeysAndValues
from nanovllm.layers.shared_kv import LendingAttention, SharedKVAttention
from nanovllm.layers.value_norm import KeysAsValues, ValueNormAttention

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN, SIZES, HEAD_DIM, BLOCK_SIZE, ROPE = 24, (4, 2, 16), 16, 4, "rope"
ROPE_OF: dict[str, Any] = dict(partial_rotary_factor=0.25, rope_theta=100.0)
MAKE = Build(ALONE, PLAIN_FORMATS, 64)


@pytest.fixture(params=["plain", "cpu", "triton"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "cpu":
        request.getfixturevalue("compiler")
        return cpu_kernels()
    if request.param == "triton":
        if torch.cuda.is_available():
            pytest.skip("the other tests run on a CPU")
        return triton_kernels()
    return PLAIN


def own(window: int | None = None, lends: bool = True) -> ValueNormAttention:
    norms = RMSNorm(HEAD_DIM, 1e-6), RMSNorm(HEAD_DIM, 1e-6)
    return ValueNormAttention(
        MAKE, HIDDEN, KeysAndValues(*SIZES, window), head_norms=norms, rope=ROPE, scale=0.3,
        lends=lends,
    )  # fmt: skip


def sharing(lender: ValueNormAttention, window: int | None = None) -> SharedKVAttention:
    assert isinstance(lender.attn, LendingAttention)
    heads = SharedKeysAndValues(*SIZES, window)
    norm = RMSNorm(HEAD_DIM, 1e-6)
    return SharedKVAttention(MAKE, HIDDEN, heads, lender.attn, rope=ROPE, q_norm=norm)


def bound(mixers: list[Mixer], kernels: Kernels) -> TorchBackend:
    """Bind layers, with a cache of 8 blocks for each layer that has one."""
    backend = TorchBackend(BLOCK_SIZE)
    for module in (module for mixer in mixers for module in mixer.modules()):
        if isinstance(module, Layer):
            module.bind(Backend(backend, kernels))
        if isinstance(module, Attention):
            module.set_cache(0, *torch.zeros(2, 8, BLOCK_SIZE, 2, HEAD_DIM))
    return backend


def step(start: int, count: int, is_prefill: bool) -> Context:
    """A step of one sequence, in the cache's first blocks."""
    slots, tables = torch.arange(start, start + count), torch.arange(8, dtype=torch.int32)[None]
    if not is_prefill:
        lens = torch.tensor([start + 1], dtype=torch.int32)
        return Context(False, slots, context_lens=lens, block_tables=tables)
    ends = (torch.tensor([0, n], dtype=torch.int32) for n in (count, start + count))
    return Context(True, slots, *ends, block_tables=tables if start else None)


@pytest.mark.parametrize("window", [None, 5])
@torch.inference_mode()
def test_a_layer_that_shares_keys_is_one_with_the_same_keys(
    kernels: Kernels, window: int | None
) -> None:
    """In a prefill without cached tokens, in a chunk after cached tokens, and in decode.

    The twin has the lender's projections of keys and values, and a cache of its own.
    """
    torch.manual_seed(0)
    lender, twin = own(window), own(window, lends=False)
    layer = sharing(lender, window)
    for param in (*lender.parameters(), *twin.parameters(), *layer.parameters()):
        param.normal_(0.0, 0.4)
    keys = lender.qkv_proj.weight[SIZES[0] * HEAD_DIM :]
    twin.qkv_proj.weight.copy_(torch.cat([layer.q_proj.weight, keys]))
    twin.o_proj.weight.copy_(layer.o_proj.weight)
    twin.q_norm.weight.copy_(layer.q_norm.weight)
    twin.k_norm.weight.copy_(lender.k_norm.weight)
    backend, rope = bound([lender, twin, layer], kernels), proportional_rope(HEAD_DIM, 64, ROPE_OF)
    for start, count, is_prefill in ((0, 9, True), (9, 6, True), (15, 1, False)):
        x = torch.randn(count, HIDDEN)
        ropes = {ROPE: rope(torch.arange(start, start + count))}
        with attending(step(start, count, is_prefill), backend):
            lender.mix(x, ropes)
            shared = layer.project(layer.mix(x, ropes))
            expected = twin.project(twin.mix(x, ropes))
        torch.testing.assert_close(shared, expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_steps_keys_are_kept_until_the_last_reader_has_attended() -> None:
    """They are views of a projection of all tokens, much memory for long prompts."""
    lender = own()
    readers = [sharing(lender), sharing(lender)]
    backend, rope = bound([lender, *readers], PLAIN), proportional_rope(HEAD_DIM, 64, ROPE_OF)
    ropes, x = {ROPE: rope(torch.arange(3))}, torch.randn(3, HIDDEN)
    assert isinstance(lender.attn, LendingAttention)
    with attending(step(0, 3, True), backend):
        lender.mix(x, ropes)
        for reader in readers:
            assert lender.attn._lent is not None
            reader.mix(x, ropes)
        assert lender.attn._lent is None


def test_layers_that_share_keys_take_no_memory() -> None:
    """Groups are made of what keeps keys: as if the other layers did not exist."""
    lenders = own(), own(8)
    readers = [sharing(lender, lender.cache.window) for lender in lenders]
    modules = [module for layer in (*lenders, *readers) for module in layer.modules()]
    kept = [module for module in modules if isinstance(module, Attention)]
    assert len(kept) == 2
    pool = KVPool(divide(kept, 64), BLOCK_SIZE, torch.float32, torch.device("cpu"))
    assert pool.block_bytes == 2 * 2 * HEAD_DIM * 4 * BLOCK_SIZE
    assert all(layer.cache.num_tensors == 0 for layer in readers)


def test_layers_share_only_keys_of_equal_heads_and_windows() -> None:
    with pytest.raises(ValueError, match="only the keys of a layer with its heads and window"):
        sharing(own(window=8), window=None)


def test_the_part_of_a_rank_still_keeps_nothing() -> None:
    part = SharedKeysAndValues(8, 1, 16, 5).part(2)
    assert part == SharedKeysAndValues(4, 1, 16, 5) != KeysAndValues(4, 1, 16, 5)


@torch.inference_mode()
def test_keys_are_values_before_their_norm() -> None:
    """The value of a single token is its output: the normed key, without rotation and factors."""
    norms = RMSNorm(HEAD_DIM, 1e-6), RMSNorm(HEAD_DIM, 1e-6)
    layer = KeysAsValues(
        MAKE, HIDDEN, KeysAndValues(2, 1, HEAD_DIM), head_norms=norms, rope=ROPE, scale=1.0,
        bias=False,
    )  # fmt: skip
    layer.qk_proj.weight.normal_()
    norms[1].weight.fill_(7.0)
    keys = layer.qk_proj.weight[2 * HEAD_DIM :].clone()
    backend, rope = bound([layer], PLAIN), proportional_rope(HEAD_DIM, 64, ROPE_OF)
    x = torch.randn(1, HIDDEN)
    with attending(step(0, 1, True), backend):
        out = layer.mix(x, {ROPE: rope(torch.tensor([0]))})
    expected = torch.nn.functional.rms_norm(x @ keys.t(), (HEAD_DIM,), eps=1e-6)
    torch.testing.assert_close(out, torch.cat([expected, expected], 1))


def test_a_proportional_rope_rotates_the_fastest_pairs_of_whole_heads() -> None:
    """Of heads of 16, a quarter: pairs (0, 8) and (1, 9), with the frequencies of 16 dimensions."""
    cos, sin = proportional_rope(16, 64, ROPE_OF | {"factor": 2.0})(torch.tensor([3]))
    angles = torch.tensor([3.0 / 2, 3.0 * 100.0**-0.125 / 2])
    torch.testing.assert_close(cos[0, 0, :2], angles.cos())
    torch.testing.assert_close(sin[0, 0, :2], angles.sin())
    assert cos[0, 0, 2:].tolist() == [1.0] * 6 and sin[0, 0, 2:].tolist() == [0.0] * 6
