"""A decoder with per-layer embeddings: a second one of each token, with a part for each block.

L layers, P numbers of each part. A part is the sum of a row of a second table, looked up by the
token's id, and of a projection of the token's first embedding.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from nanovllm.layers.context import keep_adapters_of
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.layers.mixer import Ropes
from nanovllm.layers.per_layer_embedding import PerLayerBlock
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.shared_kv import SharedKVAttention
from nanovllm.layers.sizes import PerLayer
from nanovllm.models.decoder import Decoder


class PerLayerDecoder(Decoder):
    """A decoder of `PerLayerBlock`s. It computes the parts of all of them before the first block.

    Subclasses may keep several hidden states for each token between blocks. Nothing reads what the
    layers that share keys compute of a prompt's tokens, except of those that are asked for: these
    layers get no others.
    """

    def __init__(
        self,
        make: Build,
        embedding: VocabParallelEmbedding,
        blocks: Iterable[PerLayerBlock],
        norm: RMSNorm,
        ropes: Mapping[str, RotaryEmbedding],
        per_layer: PerLayer | None,
    ) -> None:
        super().__init__(make, embedding, blocks, norm, ropes)
        self.per_layer = per_layer
        if per_layer is not None:
            num_rows, size = per_layer
            hidden, width = embedding.weight.shape[1], len(self.layers) * size
            self.embed_tokens_per_layer = VocabParallelEmbedding(
                num_rows, width, make.ranks, scale=size**0.5
            )
            stored = make.inside("model").formats.of("per_layer_model_projection")
            self.per_layer_model_projection = ReplicatedLinear(hidden, width, False, stored)
            self.per_layer_projection_norm = RMSNorm(size, norm.eps)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        embedded: torch.Tensor = self.embed_tokens(input_ids)
        parts = self.parts_of(input_ids, embedded)
        ropes, layers, tapped = self.rotations(positions), [*self.layers], {}
        x, first = self.begin(embedded), len(layers) if rows is None else self._first_sharing()
        for index, layer in enumerate(layers):
            if index in self.taps:
                tapped[index] = self.end(x)
            if rows is not None and index == first:
                x, parts, ropes = self._only(rows, x, parts, ropes)
                rows = None
            if not x.shape[-2]:  # no sequence samples: their prompts end in later steps
                break
            part = parts[:, index] if parts is not None else None
            x = layer(x, part, ropes, rows if layer is layers[-1] else None)
        hidden = self.norm(self.end(x)) if x.shape[-2] else embedded[:0]
        return hidden, [tapped[index] for index in self.taps]

    def _first_sharing(self) -> int:
        """The first layer from which on all share keys, unless a later layer is tapped."""
        layers: list[Any] = [*self.layers]
        own = [i for i, x in enumerate(layers) if not isinstance(x.parts.mixer, SharedKVAttention)]
        first = max(own, default=-1) + 1
        return first if all(tap <= first for tap in self.taps) else len(layers)

    def _only(
        self, rows: torch.Tensor, x: torch.Tensor, parts: torch.Tensor | None, ropes: Ropes
    ) -> tuple[torch.Tensor, torch.Tensor | None, Ropes]:
        """The inputs of the layers that share keys, for the tokens `rows` alone."""
        layers: list[Any] = [*self.layers]
        for layer in layers:
            if isinstance(mixer := layer.parts.mixer, SharedKVAttention):
                mixer.keep_only(rows)
        if len(rows):
            keep_adapters_of(rows)
        few = {
            name: (cos.index_select(0, rows), sin.index_select(0, rows))
            for name, (cos, sin) in ropes.items()
        }
        kept = None if parts is None else parts.index_select(0, rows)
        return x.index_select(-2, rows), kept, few

    def parts_of(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor | None:
        """The second embeddings [T, L, P] of tokens with first embeddings [T, hidden]."""
        if self.per_layer is None:
            return None
        num_rows, size = self.per_layer
        known = input_ids if num_rows >= self.embed_tokens.shard.vocab_size else (
            input_ids.where(input_ids < num_rows, 0)  # the second table may lack the last ids
        )  # fmt: skip
        looked_up = self.embed_tokens_per_layer(known)
        projected = self.per_layer_model_projection(embedded) * embedded.shape[1] ** -0.5
        normed = self.per_layer_projection_norm(projected.view(-1, size)).view(looked_up.shape)
        parts: torch.Tensor = (normed + looked_up) * 2.0**-0.5
        return parts.view(len(input_ids), -1, size)

    def begin(self, embedded: torch.Tensor) -> torch.Tensor:
        """What the first block reads, of the embeddings [T, hidden]."""
        return embedded

    def end(self, x: torch.Tensor) -> torch.Tensor:
        """The hidden states [T, hidden] of what a block returns."""
        return x
