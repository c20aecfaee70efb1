"""Backend: the attention and the kernels that a rank's layers call.

All attention backends read one cache layout, [blocks, block_size, KVH, D] per layer for K and for
V, so that they can be swapped and compared on the same cache. Plain PyTorch is here; it defines the
results of the others, which `layers/backends/` has, and which are loaded when one is asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.kernels.plain import decode_attention, prefill_attention
from nanovllm.kernels.plain.decode_attention import DecodeGroup
from nanovllm.kernels.plain.prefill_attention import GroupedPrefillPlan
from nanovllm.kernels.table import Kernels
from nanovllm.layers.cache_spec import Heads
from nanovllm.layers.context import Context


@dataclass(frozen=True)
class AttentionSpec:
    """The heads, types and device that a backend must support."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int | None  # None: what the backend prefers
    in_graphs: bool  # whether decode steps are CUDA graphs, which hide how long launches take
    kv_dtype: torch.dtype  # of the cache: `dtype`, or that of codes
    needs: frozenset[str] = frozenset()  # what some layer needs, as in `LayerShape`
    has_adapters: bool = False  # whether other layers need kernels for adapters
    is_quantized: bool = False  # whether other layers need kernels for codes of weights
    has_states: bool = False  # whether other layers need kernels for states
    value_width: int | None = None  # of latent rows, which are keys and values
    one_order: bool = False  # whether a row's sums may not depend on the other rows

    @property
    def heads(self) -> Heads:
        """The heads that a plan is for."""
        return self.num_heads, self.num_kv_heads, self.head_dim


class AttentionBackend:
    """Computes attention. Its kernels read a step's lengths and blocks from a plan.

    The context says which sequences a step has. If a backend's kernels read the context instead, it
    overrides `plan`, `prefill` and `decode`.
    """

    name: str
    preferred_block_size: int
    graph_safe: bool  # whether decode reads all that changes from device tensors
    copied_layers: int  # a step may copy the KV of this many layers: the pool leaves memory for it
    heads: Heads | None = None  # the heads that plans are for; None: for any heads
    computes = frozenset({"soft_cap", "sinks"})  # of what layers may need
    clears_rows = False  # whether a prefill writes zeros to rows after the last sequence's
    reads_cache = False  # whether a prefill reads the step's own keys from the cache, too
    packs_few_queries = False  # whether a prefill's sequences with a few queries are fast
    few_rows: str | None = None  # what computes few rows without graphs: a module of `layers`
    prefill_attention: Callable[..., torch.Tensor]
    decode_attention: Callable[..., torch.Tensor]

    def __init__(self, block_size: int | None = None) -> None:
        self.block_size = block_size or self.preferred_block_size

    def plan_prefill(
        self, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, context: Context
    ) -> Any:
        """The plan of a prefill step."""
        raise NotImplementedError

    def plan_decode(
        self, context_lens: torch.Tensor, block_tables: torch.Tensor, num_queries: int
    ) -> Any:
        """The plan of a decode step."""
        raise NotImplementedError

    def plan(self, context: Context) -> None:
        """Compute what all layers share, once a step, and keep it in the context."""
        if context.is_prefill:
            assert context.cu_seqlens_q is not None and context.cu_seqlens_k is not None
            context.plan = self.plan_prefill(context.cu_seqlens_q, context.cu_seqlens_k, context)
        else:
            assert context.context_lens is not None and context.block_tables is not None
            context.plan = self.plan_decode(
                context.context_lens, context.block_tables, context.num_queries
            )

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KVLayer, context: Context
    ) -> torch.Tensor:
        """Causal attention of q [T, H, D], several tokens for each sequence."""
        return self.prefill_attention(q, k, v, kv, context.plan)

    def decode(self, q: torch.Tensor, kv: KVLayer, context: Context) -> torch.Tensor:
        """Attention of q [B, H, D], one token or a few for each sequence."""
        return self.decode_attention(q, kv, context.plan)


class TorchBackend(AttentionBackend):
    """Plain PyTorch on any device: the definition of the others. Plans sync, except on the CPU."""

    name = "torch"
    preferred_block_size = 16
    graph_safe = False
    clears_rows = True
    copied_layers = 2  # one, gathered and padded
    prefill_attention = staticmethod(prefill_attention.prefill_attention)
    decode_attention = staticmethod(decode_attention.decode_attention)

    def __init__(self, block_size: int | None = None, has_scores: bool = False) -> None:
        super().__init__(block_size)
        if has_scores:
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


class Backend(NamedTuple):
    """An attention backend, and the kernels of the other layers. `Layer.bind` receives it.

    `others` are of the same class and block size, for layers with other heads than the first ones.
    """

    attention: AttentionBackend
    kernels: Kernels
    others: tuple[AttentionBackend, ...] = ()

    def attention_of(self, heads: Heads) -> AttentionBackend:
        """The backend that plans for layers with these heads."""
        for attention in (self.attention, *self.others):
            if attention.heads is None or attention.heads == heads:
                return attention
        raise ValueError(f"`layer_shape` of the model's config has no layer with heads {heads}")

    @property
    def graph_safe(self) -> bool:
        """Whether a decode step reads all changing values from device tensors, without syncs."""
        return self.attention.graph_safe and self.kernels.graph_safe
