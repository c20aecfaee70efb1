"""Attention to latent rows in Triton."""

from functools import partial
from typing import Any

import torch

from nanovllm.layers.backend import AttentionSpec
from nanovllm.layers.backends.triton import TritonBackend


class TritonLatentBackend(TritonBackend):
    """Triton's attention for layers whose rows are the keys and the values of all heads."""

    computes = frozenset()

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        from nanovllm.kernels.triton.attention import latent_decode, latent_prefill

        assert spec.value_width is not None
        self.sizes, self.dtype = (spec.num_heads, spec.head_dim, spec.value_width), spec.dtype
        self._plan_latents: Any = latent_decode.plan_latents
        self.prefill_attention = latent_prefill.latent_prefill
        self.decode_attention = latent_decode.latent_decode
        if spec.one_order:
            from nanovllm.kernels.triton.attention import ordered_latent_decode as ordered

            self._plan_latents = partial(ordered.plan_ordered_latents, self.block_size)
            self.prefill_attention = partial(latent_prefill.latent_prefill, one_order=True)
            self.decode_attention = ordered.ordered_latent_decode

    def plan_decode(
        self, context_lens: torch.Tensor, block_tables: torch.Tensor, num_queries: int
    ) -> Any:
        """Divide a layer's work among its programs, on the device."""
        return self._plan_latents(context_lens, block_tables, self.sizes, self.dtype, num_queries)


def check_latents(spec: AttentionSpec, refusal: str) -> None:
    """Raise a ValueError, which begins with `refusal`, if the kernels do not fit the rows."""
    from nanovllm.kernels.triton.attention.latent_tiles import MOST_COLUMNS

    instead = "'torch' works everywhere"
    if spec.head_dim >= 2 * MOST_COLUMNS:
        raise ValueError(
            f"{refusal} needs latent rows of less than {2 * MOST_COLUMNS} numbers, got"
            f" {spec.head_dim}; {instead}"
        )
    if spec.needs:
        needs = " or ".join(sorted(spec.needs))
        raise ValueError(f"{refusal} cannot read latent rows with {needs}; {instead}")
