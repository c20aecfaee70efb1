"""KVLayer: the KV cache of one layer, and the layer's settings for attention."""

from dataclasses import dataclass

import torch

CODES, SCALES = torch.float8_e4m3fn, torch.bfloat16  # the types of a quantized cache


@dataclass(frozen=True, slots=True)
class KVLayer:
    """A layer's paged KV cache, the factor of its scores, and how far back a query sees.

    The caches are [blocks, block_size, KVH, D]. Before the KV pool exists they have no elements:
    the warm-up that measures memory runs without them. With a window, a query attends to the last
    `window` keys up to its own; without one (None), to all of them.

    If keys are also the values (latent attention), both caches are the same tensor, and the first
    `value_width` columns of a row are its value.

    A quantized cache has codes, and a scale for each head of a token: [blocks, KVH, block_size]. A
    value is code * scale. The scale is computed from the head's values, or fixed: `fixed_scales`
    has one scale for all keys and one for all values.

    With a soft cap, a score s is soft_cap * tanh(s / soft_cap). With `sinks`, float32 [H], the sum
    of a query's weights has one more term: exp of the head's sink, which has no value.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    scale: float
    window: int | None = None
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None
    fixed_scales: tuple[float, float] | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    value_width: int | None = None

    @property
    def needs(self) -> frozenset[str]:
        """What attention must compute besides a softmax of scaled scores, as `LayerShape.needs`."""
        return frozenset(n for n in ("soft_cap", "sinks") if getattr(self, n) is not None)

    @property
    def is_empty(self) -> bool:
        """Whether there is no cache yet."""
        return self.k_cache.numel() == 0


def head_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one head's key (or value) of a token, in a cache of this type."""
    return head_dim * dtype.itemsize + (SCALES.itemsize if dtype == CODES else 0)
