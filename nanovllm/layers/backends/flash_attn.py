"""Attention by flash-attn 2, where it is installed."""

from typing import Any

import torch

from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.layers.backend import AttentionBackend, AttentionSpec
from nanovllm.layers.context import Context


class FlashAttnBackend(AttentionBackend):
    """flash-attn 2: CUDA, 16-bit types, blocks that are a multiple of 256 tokens."""

    name = "flash_attn"
    preferred_block_size = 256
    graph_safe = True
    copied_layers = 0
    computes = frozenset({"soft_cap"})

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec.block_size)
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self.varlen_func: Any = flash_attn_varlen_func
        self.kvcache_func: Any = flash_attn_with_kvcache

    def plan(self, context: Context) -> None:
        """Give each row of a decode step a block table, as if it were a sequence."""
        if context.num_queries > 1 and context.block_tables is not None:
            context.block_tables = context.block_tables.repeat_interleave(context.num_queries, 0)

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KVLayer, context: Context
    ) -> torch.Tensor:
        if context.block_tables is not None:  # a part of some sequence is in the cache
            k, v = kv.k_cache, kv.v_cache
        out: torch.Tensor = self.varlen_func(
            q, k, v, context.cu_seqlens_q, context.cu_seqlens_k, context.max_seqlen_q,
            context.max_seqlen_k, softmax_scale=kv.scale, causal=True,
            block_table=context.block_tables, window_size=_window_size(kv.window), **_soft_cap(kv),
        )  # fmt: skip
        return out

    def decode(self, q: torch.Tensor, kv: KVLayer, context: Context) -> torch.Tensor:
        out: torch.Tensor = self.kvcache_func(
            q.unsqueeze(1), kv.k_cache, kv.v_cache, cache_seqlens=context.context_lens,
            block_table=context.block_tables, softmax_scale=kv.scale, causal=True,
            window_size=_window_size(kv.window), **_soft_cap(kv),
        )  # fmt: skip
        return out.squeeze(1)


def _soft_cap(kv: KVLayer) -> dict[str, float]:
    """flash-attn's argument, which old versions do not have."""
    return {} if kv.soft_cap is None else {"softcap": kv.soft_cap}


def _window_size(window: int | None) -> tuple[int, int]:
    """The numbers of keys before and after its own that a query sees; -1 is all."""
    return (-1, -1) if window is None else (window - 1, 0)
