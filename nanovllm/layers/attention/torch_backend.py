"""Attention in plain PyTorch."""

import torch

from nanovllm.kernels.plain import decode_attention, prefill_attention
from nanovllm.kernels.plain.decode_attention import DecodeGroup
from nanovllm.kernels.plain.prefill_attention import GroupedPrefillPlan
from nanovllm.layers.attention.base import PlannedBackend
from nanovllm.layers.context import Context


class TorchBackend(PlannedBackend):
    """Plain PyTorch on any device: the definition of the others. Plans sync, except on the CPU."""

    name = "torch"
    preferred_block_size = 16
    graph_safe = False
    copied_layers = 2  # one, gathered and padded
    prefill_attention = staticmethod(prefill_attention.prefill_attention)
    decode_attention = staticmethod(decode_attention.decode_attention)

    def __init__(self, block_size: int | None = None, soft_cap: bool = False) -> None:
        super().__init__(block_size)
        if soft_cap:
            self.copied_layers = 6  # gathered, and in float32

    def plan_prefill(
        self, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, context: Context
    ) -> GroupedPrefillPlan:
        """Group the sequences by their lengths."""
        return prefill_attention.plan_prefill(
            cu_seqlens_q, cu_seqlens_k, context.block_tables, self.block_size
        )

    def plan_decode(
        self, context_lens: torch.Tensor, block_tables: torch.Tensor, num_queries: int
    ) -> list[DecodeGroup]:
        """Group the sequences by their lengths."""
        return decode_attention.plan_decode(
            context_lens, block_tables, self.block_size, num_queries
        )
