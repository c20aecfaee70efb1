"""The attention layer of checkpoints that have scales for a quantized KV cache."""

import math
from dataclasses import replace

import torch
from torch import nn

from nanovllm.formats.stored import Loaded, copy_whole
from nanovllm.kernels.kv_layer import SCALES
from nanovllm.layers.attention import Attention
from nanovllm.layers.backend import Backend
from nanovllm.layers.cache_spec import TokenCache


class ScaledAttention(Attention):
    """Attention with one scale for all keys, and one for all values."""

    def __init__(
        self, cache: TokenCache, score_scale: float | None = None, soft_cap: float | None = None
    ) -> None:
        super().__init__(cache, score_scale, soft_cap)
        for name in ("k_scale", "v_scale"):
            scale = torch.ones((), dtype=torch.float32)
            self.register_parameter(name, nn.Parameter(scale, requires_grad=False))

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill a scale, which some files have as a vector of one element."""
        assert shard_id is None
        copy_whole(param, loaded[0] if tuple(loaded.shape) == (1,) else loaded)

    def bind(self, backend: Backend) -> None:
        super().bind(backend)
        self.kv = replace(self.kv, fixed_scales=(self._scale("k"), self._scale("v")))

    def _scale(self, which: str) -> float:
        """A checkpoint's scale, rounded to the type in which the cache has scales.

        Codes are made and read with the rounded scale, so that rounding adds no error to them.
        """
        scale = float(self.get_parameter(f"{which}_scale").to(SCALES))
        if not 0 < scale < math.inf:
            raise ValueError(f"{which}_scale must be above 0, got {scale}")
        return scale
