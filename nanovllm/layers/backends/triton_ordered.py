"""Attention in Triton, in one order of sums."""

from typing import Any

import torch

from nanovllm.layers.backend import AttentionSpec
from nanovllm.layers.backends.triton import TritonBackend


class OrderedTritonBackend(TritonBackend):
    """Triton's attention with results that do not depend on how steps are divided.

    Later steps read codes, so a prefill reads them, too.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        from nanovllm.kernels.triton.attention import (
            ordered_decode,
            ordered_plan,
            ordered_prefill,
        )

        self._all_heads = spec.heads
        self.reads_cache = spec.kv_dtype != spec.dtype
        self._plan_ordered = ordered_plan.plan_ordered_decode
        self.prefill_attention = ordered_prefill.ordered_prefill
        self.decode_attention = ordered_decode.ordered_decode

    def plan_decode(
        self, context_lens: torch.Tensor, block_tables: torch.Tensor, num_queries: int
    ) -> Any:
        """Divide a layer's work among its programs, on the device."""
        return self._plan_ordered(
            context_lens, block_tables, self._all_heads, self.block_size, self.copies_tiles,
            num_queries,
        )  # fmt: skip
