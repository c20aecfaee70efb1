"""DecoderOfNormed: a decoder that normalizes embeddings before its first block."""

from typing import Any

import torch

from nanovllm.models.decoder import Decoder


class DecoderOfNormed(Decoder):
    """The norm at the end also normalizes the embeddings."""

    def embed(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:  # noqa: ARG002
        return self.norm(self.embed_tokens(input_ids))
