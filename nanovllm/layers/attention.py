"""Attention: from a step's projections to its outputs, through the paged KV cache."""

import torch
from torch import nn

from nanovllm.kernels.plain import Rope
from nanovllm.layers.attention_backends import AttentionBackend, TorchBackend
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.utils.context import get_context


class Attention(nn.Module):
    """Rotate, store the step's KV, attend. The runner binds `backend` and the caches.

    With a window, a token attends to so many: to itself, and to those right before it.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, window: int | None = None) -> None:
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.window = window
        self.scale = head_dim**-0.5
        self.backend: AttentionBackend = TorchBackend()
        # Empty until there is a pool: the warm-up that measures memory runs before.
        self.k_cache = self.v_cache = torch.empty(0)

    def forward(
        self, qkv: torch.Tensor, rope: Rope, norms: tuple[RMSNorm, RMSNorm] | None = None
    ) -> torch.Tensor:
        """qkv [T, H + 2 * KVH, D] -> [T, H, D]; `norms` are those of query and key heads."""
        context = get_context()
        weights = (norms[0].weight, norms[1].weight) if norms else None
        q, k, v = self.backend.kernels.norm_rope_store(
            qkv, self.num_kv_heads, rope, weights, norms[0].eps if norms else 0.0,
            self.k_cache, self.v_cache, context.slot_mapping,
        )  # fmt: skip
        if context.is_prefill:
            return self.backend.prefill(
                q, k, v, self.k_cache, self.v_cache, context, self.scale, self.window
            )
        return self.backend.decode(q, self.k_cache, self.v_cache, context, self.scale, self.window)
