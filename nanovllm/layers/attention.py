"""Attention: the layer, and the table of backends that compute it.

A backend reads and writes one cache layout, `[blocks, block_size, KVH, D]` per layer for K and for
V, so that backends can be swapped and compared on the same cache.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from nanovllm.kernels import paged_attention
from nanovllm.utils.context import Context, get_context


class AttentionBackend(ABC):
    """How attention is computed; the context says over what."""

    name: str
    block_size: int  # what it prefers
    graph_safe: bool  # whether decode reads all that changes from device tensors
    copied_layers: int  # layers' worth of KV that a step may copy: memory the pool must leave

    def __init__(self, device: torch.device) -> None:
        self.store_kvcache = paged_attention.store_kvcache_torch
        if device.type == "cuda":
            from nanovllm.kernels.store_kvcache import store_kvcache

            self.store_kvcache = store_kvcache

    def plan(self, context: Context, block_size: int) -> None:  # noqa: B027
        """Work out, once a step, what all layers share."""

    @abstractmethod
    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: "Attention", ctx: Context
    ) -> torch.Tensor:
        """Causal attention of q [T, H, D], several tokens for each sequence."""

    @abstractmethod
    def decode(self, q: torch.Tensor, layer: "Attention", ctx: Context) -> torch.Tensor:
        """Attention of q [B, H, D], one token for each sequence."""


class TorchBackend(AttentionBackend):
    """Plain PyTorch on any device: the definition of the others, and fast on the CPU."""

    name = "torch"
    block_size = 16
    graph_safe = False
    copied_layers = 2  # one, gathered and padded

    def plan(self, context: Context, block_size: int) -> None:
        """Group the sequences by length. Syncs where the device is not the CPU."""
        if context.is_prefill:
            assert context.cu_seqlens_q is not None and context.cu_seqlens_k is not None
            context.plan = paged_attention.plan_prefill(
                context.cu_seqlens_q, context.cu_seqlens_k, context.block_tables, block_size
            )
        else:
            assert context.context_lens is not None and context.block_tables is not None
            context.plan = paged_attention.plan_decode(
                context.context_lens, context.block_tables, block_size
            )

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: "Attention", ctx: Context
    ) -> torch.Tensor:
        return paged_attention.prefill_attention(
            q, k, v, layer.k_cache, layer.v_cache, ctx.plan, layer.scale
        )

    def decode(self, q: torch.Tensor, layer: "Attention", ctx: Context) -> torch.Tensor:
        return paged_attention.decode_attention(
            q, layer.k_cache, layer.v_cache, ctx.plan, layer.scale
        )


class FlashAttnBackend(AttentionBackend):
    """flash-attn 2: CUDA, 16-bit types, blocks that are a multiple of 256 tokens."""

    name = "flash_attn"
    block_size = 256
    graph_safe = True
    copied_layers = 0

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self.varlen_func: Any = flash_attn_varlen_func
        self.kvcache_func: Any = flash_attn_with_kvcache

    def probe(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
        """Run both functions on one token: builds differ in what they can do. Syncs."""
        x = torch.zeros(1, 1, head_dim, dtype=dtype, device=device)
        ends = torch.tensor([0, 1], dtype=torch.int32, device=device)
        self.varlen_func(x, x, x, ends, ends, 1, 1, causal=True)
        cache = torch.zeros(1, self.block_size, 1, head_dim, dtype=dtype, device=device)
        self.kvcache_func(
            x[None], cache, cache, cache_seqlens=ends[1:], block_table=ends[None, :1], causal=True
        )
        torch.cuda.synchronize(device)

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: "Attention", ctx: Context
    ) -> torch.Tensor:
        if ctx.block_tables is not None:  # a part of some sequence is in the cache
            k, v = layer.k_cache, layer.v_cache
        out: torch.Tensor = self.varlen_func(
            q, k, v, ctx.cu_seqlens_q, ctx.cu_seqlens_k, ctx.max_seqlen_q, ctx.max_seqlen_k,
            softmax_scale=layer.scale, causal=True, block_table=ctx.block_tables,
        )  # fmt: skip
        return out

    def decode(self, q: torch.Tensor, layer: "Attention", ctx: Context) -> torch.Tensor:
        out: torch.Tensor = self.kvcache_func(
            q.unsqueeze(1), layer.k_cache, layer.v_cache, cache_seqlens=ctx.context_lens,
            block_table=ctx.block_tables, softmax_scale=layer.scale, causal=True,
        )  # fmt: skip
        return out.squeeze(1)


def get_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None
) -> AttentionBackend:
    """Build the backend `name`; "auto" is flash-attn where it works and plain PyTorch elsewhere."""
    if name == "torch":
        return TorchBackend(device)
    reason = _why_not_flash_attn(device, dtype, head_dim, block_size)
    if reason is None:
        return FlashAttnBackend(device)
    if name == "auto":
        return TorchBackend(device)
    raise ValueError(f"attention_backend='flash_attn' {reason}; 'torch' works everywhere")


def _why_not_flash_attn(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None
) -> str | None:
    if device.type != "cuda":
        return f"needs a CUDA device, got device={device.type!r}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"needs dtype 'float16' or 'bfloat16', got {str(dtype).removeprefix('torch.')!r}"
    if block_size is not None and block_size % FlashAttnBackend.block_size:
        return f"needs kvcache_block_size to be a multiple of 256, got {block_size}"
    try:
        FlashAttnBackend(device).probe(device, dtype, head_dim)
    except ImportError as error:
        return f"cannot import flash-attn ({error}); pip install flash-attn --no-build-isolation"
    except Exception as error:  # built for another PyTorch, GPU, type or head size
        return f"has a flash-attn that does not work here ({type(error).__name__}: {error})"
    return None


class Attention(nn.Module):
    """Store the step's KV in the cache, attend. The runner binds `backend` and the caches."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.scale = head_dim**-0.5
        self.backend: AttentionBackend = TorchBackend(torch.device("cpu"))
        self.k_cache = self.v_cache = torch.empty(0)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, H, D], k and v [T, KVH, D] -> [T, H, D]."""
        context = get_context()
        if self.k_cache.numel():  # the warm-up that measures memory runs before there is a cache
            self.backend.store_kvcache(k, v, self.k_cache, self.v_cache, context.slot_mapping)
        if context.is_prefill:
            return self.backend.prefill(q, k, v, self, context)
        return self.backend.decode(q, self, context)
