"""ClippedAttention: self-attention with limits for queries, keys and values."""

from typing import Any

import torch

from nanovllm.layers.mixer import SelfAttention


class ClippedAttention(SelfAttention):
    """All elements of queries, keys and values are clipped to [-limit, limit], after the norms."""

    def __init__(self, *args: Any, limit: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.limit = limit
        assert self.has_head_norms and self.norms is None, "only norms that no kernel fuses"

    def _normed(self, qkv: torch.Tensor) -> torch.Tensor:
        return super()._normed(qkv).clamp_(-self.limit, self.limit)
