"""Attention in C++ on the CPU."""

import torch

from nanovllm.kernels.cpu import decode_attention, prefill_attention
from nanovllm.kernels.cpu.attention import AttentionPlan
from nanovllm.layers.backend import AttentionBackend, AttentionSpec
from nanovllm.layers.context import Context


def tables_of(slots: torch.Tensor, ends: torch.Tensor, block_size: int) -> torch.Tensor | None:
    """The block tables of sequences that have all of their tokens in a step.

    None if the cache does not store some of them.
    """
    if not len(slots) or int(slots.min()) < 0:
        return None
    width = -(-int(ends.diff().max()) // block_size)
    tokens = ends[:-1, None] + torch.arange(width) * block_size
    return (slots[torch.minimum(tokens, ends[1:, None] - 1)] // block_size).int()


class CpuBackend(AttentionBackend):
    """Our own kernels for the CPU, compiled on this machine: float32 and bfloat16."""

    name = "cpu"
    preferred_block_size = 16
    graph_safe = False
    copied_layers = 0
    packs_few_queries = True
    few_rows = "whole_blocks"
    prefill_attention = staticmethod(prefill_attention.prefill_attention)
    decode_attention = staticmethod(decode_attention.decode_attention)

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec.block_size)
        self.heads = spec.heads
        self.sizes = (spec.num_heads // spec.num_kv_heads, spec.head_dim)
        self.has_codes = spec.kv_dtype != spec.dtype

    def plan_prefill(
        self, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, context: Context
    ) -> AttentionPlan:
        """Divide a layer's work into tasks for the threads.

        Codes are always read from the cache: a later step cannot read other numbers.
        """
        tables = context.block_tables
        if tables is None and self.has_codes:
            tables = tables_of(context.slot_mapping, cu_seqlens_q, self.block_size)
        return prefill_attention.plan_prefill(cu_seqlens_q, cu_seqlens_k, tables, *self.sizes)

    def plan_decode(
        self, context_lens: torch.Tensor, block_tables: torch.Tensor, num_queries: int
    ) -> AttentionPlan:
        """Divide a layer's work into tasks for the threads. Each query reads the keys anew."""
        if num_queries > 1:
            block_tables = block_tables.repeat_interleave(num_queries, dim=0)
        return decode_attention.plan_decode(context_lens, block_tables, *self.sizes)
