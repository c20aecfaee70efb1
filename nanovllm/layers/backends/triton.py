"""Attention in Triton."""

from typing import Any

import torch

from nanovllm.layers.backend import AttentionBackend, AttentionSpec
from nanovllm.layers.context import Context


class TritonBackend(AttentionBackend):
    """Our own kernels for CUDA, any type and block size; on the CPU in Triton's interpreter."""

    name = "triton"
    preferred_block_size = 64
    graph_safe = True
    clears_rows = True
    copied_layers = 0

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec.block_size)
        from nanovllm.kernels.triton.attention import (
            decode_attention,
            decode_plan,
            prefill_attention,
            prefill_plan,
        )

        self.heads = spec.heads
        if spec.kv_dtype != spec.dtype:
            self.computes = frozenset({"sinks"})
        self.num_kv_heads = spec.num_kv_heads
        self.group = spec.num_heads // spec.num_kv_heads
        self.copies_tiles = spec.in_graphs
        self._plan_prefill = prefill_plan.plan_prefill
        self._plan_decode = decode_plan.plan_decode
        self.prefill_attention = prefill_attention.prefill_attention
        self.decode_attention = decode_attention.decode_attention

    def plan_prefill(
        self, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, context: Context
    ) -> Any:
        """Divide a layer's work among its programs, on the device."""
        num_tokens = len(context.slot_mapping)
        return self._plan_prefill(cu_seqlens_q, cu_seqlens_k, context.block_tables, num_tokens)

    def plan_decode(
        self, context_lens: torch.Tensor, block_tables: torch.Tensor, num_queries: int
    ) -> Any:
        """Divide a layer's work among its programs, on the device."""
        return self._plan_decode(
            context_lens, block_tables, self.num_kv_heads, self.copies_tiles, num_queries,
            self.group,
        )  # fmt: skip
