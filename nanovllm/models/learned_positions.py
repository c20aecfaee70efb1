"""PositionedDecoder: a decoder that adds a learned vector for each position to the embeddings."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.block import Block
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.layer import Build, Layer
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.models.decoder import Decoder


class PositionTable(Layer):
    """A vector for each position: positions [T] -> [T, hidden]. Every rank has the whole table.

    `offset` is the row of position 0.
    """

    def __init__(self, num_positions: int, hidden_size: int, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        table = torch.empty(num_positions + offset, hidden_size)
        self.weight = nn.Parameter(table, requires_grad=False)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return F.embedding(positions + self.offset if self.offset else positions, self.weight)


class PositionedDecoder(Decoder):
    """A decoder whose layers rotate nothing. The config limits contexts to the table's length."""

    def __init__(
        self,
        make: Build,
        embedding: VocabParallelEmbedding,
        positions: PositionTable,
        blocks: Iterable[Block],
        norm: RMSNorm,
    ) -> None:
        super().__init__(make, embedding, blocks, norm, ropes={})
        self.embed_positions = positions

    def embed(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed_tokens(input_ids) + self.embed_positions(positions)
        return x
