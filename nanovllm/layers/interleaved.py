"""InterleavedAttention: attention whose rope rotates neighbours, (2i, 2i + 1), as pairs."""

from typing import Any

import torch

from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.layer import Build
from nanovllm.layers.mixer import Ropes, SelfAttention


class InterleavedAttention(SelfAttention):
    """`SelfAttention` with pairs (2i, 2i + 1) of the first `rotated` elements of each head.

    Scores do not change if queries and keys are reordered alike. So the even elements of each head
    are moved before the odd ones, where the usual kernels find the pairs (i, i + rotated / 2). One
    kernel copies all rows. Norms of heads are computed before it.
    """

    def __init__(
        self, make: Build, hidden_size: int, heads: KeysAndValues, *, rotated: int, **others: Any
    ) -> None:
        super().__init__(make, hidden_size, heads, **others)
        self.norms = None  # not fused with the rotation: their weights have the files' order
        num_kv_heads, dim = self.qkv_proj.num_kv_heads, self.head_dim
        with torch.device("cpu"):
            columns = torch.arange((self.qkv_proj.num_heads + 2 * num_kv_heads) * dim)
            order = columns.view(-1, dim).clone()
            pairs = order[:-num_kv_heads, :rotated]
            pairs.copy_(torch.cat([pairs[:, ::2], pairs[:, 1::2]], dim=1))
        order = order.view(-1).to(torch.get_default_device())
        self.register_buffer("order", order, persistent=False)

    def attend(self, projected: torch.Tensor, ropes: Ropes) -> torch.Tensor:
        is_ready = self.has_head_norms or self.rope is None  # or `_normed` reorders
        return super().attend(projected if is_ready else self._reordered(projected), ropes)

    def _normed(self, qkv: torch.Tensor) -> torch.Tensor:
        normed = super()._normed(qkv)
        if self.rope is None:
            return normed
        return self._reordered(normed.flatten(1)).view(normed.shape)

    def _reordered(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.index_select(1, self.get_buffer("order"))
