"""LateHeadNorms: attention that normalizes heads after their rotation."""

from typing import Any

import torch

from nanovllm.kernels.plain.norm_rope_store import rotate
from nanovllm.layers.mixer import Ropes, SelfAttention


class LateHeadNorms(SelfAttention):
    """`SelfAttention` with norms of heads after the rotation, in a launch for each operation."""

    def attend(self, projected: torch.Tensor, ropes: Ropes) -> torch.Tensor:
        if self.rope is None:
            return super().attend(projected, ropes)
        qkv: Any = projected.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-untyped-call]
        heads, values = qkv.tensor_split([-self.qkv_proj.num_kv_heads], dim=1)
        qkv = torch.cat([rotate(heads, ropes[self.rope]), values], dim=1)
        attended: torch.Tensor = self.attn(qkv, None, self.norms)
        return attended.flatten(1)
