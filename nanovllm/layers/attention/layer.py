"""Attention: from a step's projections to its outputs, through the paged KV cache."""

import torch

from nanovllm.kernels.plain.norm_rope_store import Rope
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.attention_backends import AttentionBackend, TorchBackend
from nanovllm.layers.backend import Backend
from nanovllm.layers.context import get_context
from nanovllm.layers.layer import Layer
from nanovllm.layers.layernorm import RMSNorm


class Attention(Layer):
    """Rotate, store the step's KV, attend.

    With a window, a token attends to so many: to itself, and to those right before it.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, window: int | None = None) -> None:
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.window = window
        self.scale = head_dim**-0.5
        self.backend: AttentionBackend = TorchBackend()
        self.kernels: Kernels = PLAIN
        # Empty until there is a pool: the warm-up that measures memory runs before.
        self.k_cache = self.v_cache = torch.empty(0)

    def bind(self, backend: Backend) -> None:
        self.backend, self.kernels = backend

    def set_cache(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Use these caches [blocks, block_size, KVH, D]."""
        self.k_cache, self.v_cache = k_cache, v_cache

    def drop_cache(self) -> None:
        """Hold no cache, so that its memory can be freed."""
        self.k_cache = self.v_cache = torch.empty(0)

    def forward(
        self, qkv: torch.Tensor, rope: Rope, norms: tuple[RMSNorm, RMSNorm] | None = None
    ) -> torch.Tensor:
        """qkv [T, H + 2 * KVH, D] -> [T, H, D]; `norms` are those of query and key heads."""
        context = get_context()
        weights = (norms[0].weight, norms[1].weight) if norms else None
        q, k, v = self.kernels.norm_rope_store(
            qkv, self.num_kv_heads, rope, weights, norms[0].eps if norms else 0.0,
            self.k_cache, self.v_cache, context.slot_mapping,
        )  # fmt: skip
        if context.is_prefill:
            return self.backend.prefill(
                q, k, v, self.k_cache, self.v_cache, context, self.scale, self.window
            )
        return self.backend.decode(q, self.k_cache, self.v_cache, context, self.scale, self.window)
