"""The attention layer: its path without rotation against the fused one, on every room's kernels."""

import pytest
import torch

from nanovllm.kernels.cpu.table import cpu_kernels
from nanovllm.kernels.kv_layer import CODES, SCALES
from nanovllm.kernels.plain.kv_codes import dequantize, quantize
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.kernels.triton.table import triton_kernels
from nanovllm.layers.attention import Attention
from nanovllm.layers.backend import Backend, TorchBackend
from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.context import Context, attending
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.layers.scaled_attention import ScaledAttention

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 7, 4, 2, 64, 4
CACHE = KeysAndValues(HEADS, KV_HEADS, HEAD_DIM)


@pytest.fixture(params=["plain", "cpu", "triton"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "cpu":
        request.getfixturevalue("compiler")
        return cpu_kernels()
    if request.param == "triton":
        request.getfixturevalue("kernel_device")
        return triton_kernels()
    return PLAIN


def device_of(kernels: Kernels) -> str:
    return "cuda" if kernels.name == "Triton" and torch.cuda.is_available() else "cpu"


def make_norms(dtype: torch.dtype, device: str) -> tuple[RMSNorm, RMSNorm]:
    norms = RMSNorm(HEAD_DIM, 1e-6), RMSNorm(HEAD_DIM, 1e-6)
    for norm in norms:
        norm.weight.data = torch.rand(HEAD_DIM).to(device, dtype)
    return norms


def attend(
    kernels: Kernels,
    qkv: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    norms: tuple[RMSNorm, RMSNorm] | None,
    cached: bool,
    quantized: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of one sequence's prefill, and the cache after it; one token has no slot.

    A quantized one is returned as codes times scales.
    """
    layer = Attention(CACHE)
    backend = TorchBackend(BLOCK_SIZE)
    layer.bind(Backend(backend, kernels))
    caches = qkv.new_zeros(2, 4, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    scales = qkv.new_zeros(2, 4, KV_HEADS, BLOCK_SIZE, dtype=SCALES)
    if quantized:
        caches = caches.to(CODES)
    num_blocks = 4 if cached else 0
    if cached or quantized:
        both = scales[:, :num_blocks] if quantized else ()
        layer.set_cache(0, *caches[:, :num_blocks], *both)
    slots = torch.tensor([3, 9, 0, -1, 5, 15, 1], device=qkv.device)
    ends = torch.tensor([0, TOKENS], dtype=torch.int32, device=qkv.device)
    context = Context(True, slots, cu_seqlens_q=ends, cu_seqlens_k=ends)
    with attending(context, backend):
        out = layer(qkv, rope, norms)
        if quantized:
            caches = caches.float() * scales.transpose(2, 3)[..., None].float()
        return out, caches


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("with_norms", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rope_equals_the_identity_rotation(
    kernels: Kernels, dtype: torch.dtype, with_norms: bool, cached: bool, quantized: bool
) -> None:
    """Rotations by the angle 0 change nothing, so both paths compute the same."""
    torch.manual_seed(0)
    device = device_of(kernels)
    qkv = torch.randn(TOKENS, HEADS + 2 * KV_HEADS, HEAD_DIM).to(device, dtype)
    norms = make_norms(dtype, device) if with_norms else None
    one, zero = (f(TOKENS, 1, HEAD_DIM // 2, device=device) for f in (torch.ones, torch.zeros))
    expected, expected_caches = attend(kernels, qkv, (one, zero), norms, cached, quantized)
    out, caches = attend(kernels, qkv, None, norms, cached, quantized)
    # The fused Triton kernel adds up a norm's squares in another order.
    tolerance = torch.finfo(dtype).eps if with_norms and kernels.name == "Triton" else 0.0
    if tolerance and quantized:
        tolerance = 2.0**-4  # another code
    torch.testing.assert_close(out, expected, rtol=2 * tolerance, atol=2 * tolerance)
    torch.testing.assert_close(caches, expected_caches, rtol=2 * tolerance, atol=tolerance)
    assert bool(caches.any()) == cached, "nothing is stored, or something without a cache"


def test_fixed_scales_replace_those_of_each_token(kernels: Kernels) -> None:
    """On both paths: what is kept is a multiple of the scale, and large values saturate."""
    device = device_of(kernels)
    qkv = torch.linspace(-3, 3, TOKENS * 8 * HEAD_DIM, device=device).view(TOKENS, 8, HEAD_DIM)
    layer = ScaledAttention(CACHE)
    layer.weight_loader(layer.k_scale, torch.tensor(2.0**-9), None)
    layer.weight_loader(layer.v_scale, torch.tensor([2.0**-7]), None)
    caches = torch.zeros(2, 4, BLOCK_SIZE, KV_HEADS, HEAD_DIM, device=device).to(CODES)
    scales = torch.zeros(2, 4, KV_HEADS, BLOCK_SIZE, device=device, dtype=SCALES)
    layer.set_cache(0, *caches, *scales)
    layer.bind(Backend(TorchBackend(BLOCK_SIZE), kernels))
    one, zero = (f(TOKENS, 1, HEAD_DIM // 2, device=device) for f in (torch.ones, torch.zeros))
    slots = torch.arange(TOKENS, device=device)
    for rope in ((one, zero), None):
        if rope is None:
            _, k, v = layer._norm_and_store(qkv, None, slots)
        else:
            _, k, v = kernels.norm_rope_store(qkv, KV_HEADS, rope, None, 0.0, layer.kv, slots)
        for kept, x, scale in ((k, qkv[:, 4:6], 2.0**-9), (v, qkv[:, 6:], 2.0**-7)):
            expected = (x / scale).clamp(-448, 448).to(CODES).float() * scale
            assert torch.equal(kept, expected)
            assert x.abs().max() > 448 * 2.0**-9
        for held, scale in zip(scales, (2.0**-9, 2.0**-7), strict=True):
            stored = held.transpose(1, 2).flatten(0, 1)[:TOKENS]
            assert torch.equal(stored, torch.full_like(stored, scale))
        scales.zero_()


@pytest.mark.parametrize("scale", [0.0123, 1.004, 3e-5, 417.3])
def test_a_checkpoints_scale_of_keys_is_rounded_once(scale: float) -> None:
    """To the cache's type, by at most 1 / 256; codes are made and read with the same scale."""
    layer = ScaledAttention(CACHE)
    layer.weight_loader(layer.k_scale, torch.tensor(scale), None)
    layer.bind(Backend(TorchBackend(BLOCK_SIZE), PLAIN))
    assert layer.kv.fixed_scales is not None
    used = layer.kv.fixed_scales[0]
    assert used == float(torch.tensor(scale).to(SCALES)) and abs(used / scale - 1) <= 1 / 256
    keys = torch.linspace(-400, 400, 64).view(1, 1, 64) * scale
    codes, scales = quantize(keys, used)
    assert float(scales.unique()) == used
    error = (dequantize(codes, scales, keys.dtype) - keys).abs()
    assert bool((error <= keys.abs() / 16).all()), "more than half a step of a code"


def test_a_soft_cap_that_the_backend_does_not_know_of_is_refused() -> None:
    """The backend is chosen before the layers are made."""

    class Uncapped(TorchBackend):
        computes = frozenset()

    layer = Attention(CACHE, soft_cap=1.0)
    with pytest.raises(ValueError, match="lacks soft_cap"):
        layer.bind(Backend(Uncapped(BLOCK_SIZE), PLAIN))
    layer.bind(Backend(TorchBackend(BLOCK_SIZE), PLAIN))
