"""The attention layer: from a step's projections to its outputs, through the paged KV cache."""

from dataclasses import replace

import torch

from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.kernels.plain.norm_rope_store import Rope
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.backend import AttentionBackend, Backend, TorchBackend
from nanovllm.layers.cache_spec import TokenCache
from nanovllm.layers.context import Context, get_context
from nanovllm.layers.layer import Layer
from nanovllm.layers.rms_norm import RMSNorm

Norms = tuple[RMSNorm, RMSNorm]  # of query heads and of key heads


class Attention(Layer):
    """Rotate, store the step's KV, attend; or store latent rows, and attend.

    `cache` has this rank's heads. With a window, a token attends to the last `window` tokens,
    including itself. `score_scale` is the factor of the scores, by default `head_dim` to the power
    of -1/2. A `soft_cap` c replaces a score s by c * tanh(s / c).
    """

    def __init__(
        self, cache: TokenCache, score_scale: float | None = None, soft_cap: float | None = None
    ) -> None:
        super().__init__()
        self.cache = cache
        _, self.num_kv_heads, self.head_dim = cache.heads
        self.group = 0
        factor = self.head_dim**-0.5 if score_scale is None else score_scale
        none, window, values = torch.empty(0), cache.window, cache.value_width
        self.kv = KVLayer(none, none, factor, window, soft_cap=soft_cap, value_width=values)
        self.attention_backend: AttentionBackend = TorchBackend()
        self.kernels: Kernels = PLAIN

    def bind(self, backend: Backend) -> None:
        self.attention_backend = backend.attention_of(self.cache.heads)
        self.kernels = backend.kernels
        if unknown := self.kv.needs - self.attention_backend.computes:
            raise ValueError(f"`needs` of the config's `layer_shape` lacks {', '.join(unknown)}")

    def set_cache(
        self,
        group: int,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k_scales: torch.Tensor | None = None,
        v_scales: torch.Tensor | None = None,
    ) -> None:
        """Use these caches [blocks, block_size, KVH, D], with scales if they are quantized.

        For latent rows, both caches are the same tensor. The block tables of the cache group
        `group` say which blocks a sequence has.
        """
        self.group = group
        self.kv = replace(
            self.kv, k_cache=k_cache, v_cache=v_cache, k_scales=k_scales, v_scales=v_scales
        )

    def forward(
        self, qkv: torch.Tensor, rope: Rope | None, norms: Norms | None = None
    ) -> torch.Tensor:
        """qkv [T, H + 2 * KVH, D] -> [T, H, D]. Without `rope`, positions are not encoded."""
        context = get_context(self.group)
        if rope is None:
            q, k, v = self._norm_and_store(qkv, norms, context.slot_mapping)
        else:
            weights = (norms[0].weight, norms[1].weight) if norms else None
            q, k, v = self.kernels.norm_rope_store(
                qkv, self.num_kv_heads, rope, weights, norms[0].eps if norms else 0.0,
                self.kv, context.slot_mapping,
            )  # fmt: skip
        return self._attend(q, k, v, context)

    def attend_latent(self, q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Store latent rows [T, 1, D]; q [T, H, D] -> [T, H, value_width], the sums of values."""
        context = get_context(self.group)
        k, v = self.kernels.store_kvcache(rows, rows, self.kv, context.slot_mapping)
        return self._attend(q, k, v, context)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context
    ) -> torch.Tensor:
        if context.is_prefill:
            return self.attention_backend.prefill(q, k, v, self.kv, context)
        return self.attention_backend.decode(q, self.kv, context)

    def _norm_and_store(
        self, qkv: torch.Tensor, norms: Norms | None, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `norm_rope_store`, without a rotation, in a launch for each operation."""
        num_q_heads = qkv.shape[1] - 2 * self.num_kv_heads
        heads = [num_q_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = torch.split(qkv, heads, dim=1)
        if norms:
            q, k = self._norm(q, norms[0]), self._norm(k, norms[1])
        return q, *self.kernels.store_kvcache(k, v, self.kv, slots)

    def _norm(self, heads: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """Each head of [T, heads, D], which is copied to rows for the kernel."""
        rows = heads.reshape(-1, heads.shape[-1])
        return self.kernels.rms_norm(rows, norm.weight, norm.eps).view(heads.shape)
