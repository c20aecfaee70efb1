"""The two ends of the model: token ids to vectors, vectors to logits."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.linear import LinearBase


class VocabParallelEmbedding(nn.Module):
    """The embedding table: token ids [T] -> [T, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)


class ParallelLMHead(LinearBase):
    """The projection to the vocabulary: [T, hidden] -> [T, vocab]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__(hidden_size, vocab_size)

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Use the embedding's table; packing leaves the table as it is and makes a copy."""
        self.weight = embedding.weight
