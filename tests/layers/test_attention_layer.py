"""The attention layer: its path without rotation against the fused one, on every room's kernels."""

import pytest
import torch

from nanovllm.kernels.table import PLAIN, Kernels, cpu_kernels, triton_kernels
from nanovllm.layers.attention.layer import Attention
from nanovllm.layers.attention.torch_backend import TorchBackend
from nanovllm.layers.backend import Backend
from nanovllm.layers.context import Context, reset_context, set_context
from nanovllm.layers.layernorm import RMSNorm

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 7, 4, 2, 64, 4


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of one sequence's prefill, and the cache after it; one token has no slot."""
    layer = Attention(KV_HEADS, HEAD_DIM)
    backend = TorchBackend(BLOCK_SIZE)
    layer.bind(Backend(backend, kernels))
    caches = qkv.new_zeros(2, 4, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    if cached:
        layer.set_cache(*caches)
    slots = torch.tensor([3, 9, 0, -1, 5, 15, 1], device=qkv.device)
    ends = torch.tensor([0, TOKENS], dtype=torch.int32, device=qkv.device)
    context = Context(True, slots, cu_seqlens_q=ends, cu_seqlens_k=ends)
    backend.plan(context)
    set_context(context)
    try:
        return layer(qkv, rope, norms), caches
    finally:
        reset_context()


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("with_norms", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rope_equals_the_identity_rotation(
    kernels: Kernels, dtype: torch.dtype, with_norms: bool, cached: bool
) -> None:
    """Rotations by the angle 0 change nothing, so both paths compute the same."""
    torch.manual_seed(0)
    device = device_of(kernels)
    qkv = torch.randn(TOKENS, HEADS + 2 * KV_HEADS, HEAD_DIM).to(device, dtype)
    norms = make_norms(dtype, device) if with_norms else None
    one, zero = (f(TOKENS, 1, HEAD_DIM // 2, device=device) for f in (torch.ones, torch.zeros))
    expected, expected_caches = attend(kernels, qkv, (one, zero), norms, cached)
    out, caches = attend(kernels, qkv, None, norms, cached)
    # The fused Triton kernel adds up a norm's squares in another order.
    tolerance = torch.finfo(dtype).eps if with_norms and kernels.name == "Triton" else 0.0
    torch.testing.assert_close(out, expected, rtol=2 * tolerance, atol=2 * tolerance)
    torch.testing.assert_close(caches, expected_caches, rtol=2 * tolerance, atol=tolerance)
    assert bool(caches.any()) == cached, "nothing is stored, or something without a cache"
