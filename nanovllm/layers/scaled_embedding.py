"""An embedding that is multiplied by a factor, for tables of every format."""

import torch

from nanovllm.layers.embed_head import VocabParallelEmbedding


def scaled(embedding: VocabParallelEmbedding, scale: float) -> VocabParallelEmbedding:
    """The embedding, multiplied by `scale`, which is rounded to the embeddings' type."""
    embedding.scale = torch.tensor(scale, dtype=torch.get_default_dtype(), device="cpu").item()
    return embedding
