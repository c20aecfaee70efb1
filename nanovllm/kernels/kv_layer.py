"""KVLayer: what attention needs to know of one layer beside queries, keys and values."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVLayer:
    """A layer's paged KV cache, the factor of its scores, and how far back a query sees.

    The caches are [blocks, block_size, KVH, D]. Before the KV pool exists they have no elements:
    the warm-up that measures memory runs without them. With a window, a query attends to the last
    `window` keys up to its own; without one (None), to all of them.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    scale: float
    window: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is no cache yet."""
        return self.k_cache.numel() == 0
