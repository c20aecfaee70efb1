"""The embedding and the output projection: token ids to vectors, vectors to logits.

The ranks split the vocabulary. If its size is not a multiple of their number, it is padded at the
end; the logits of padding rows are cut off.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.formats.format import DENSE, WeightFormat
from nanovllm.formats.stored import Loaded, RankPart, copy_into
from nanovllm.layers.context import adapter_rows
from nanovllm.layers.layer import Layer
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from nanovllm.kernels.operands.low_rank import LowRank


class VocabularyShard:
    """The rows of a vocabulary table that this rank holds."""

    def __init__(self, vocab_size: int, ranks: Ranks) -> None:
        self.vocab_size = vocab_size
        self.num_rows = -(-vocab_size // ranks.size)  # with padding
        self.start = min(ranks.rank * self.num_rows, vocab_size)
        self.stop = min(self.start + self.num_rows, vocab_size)

    def load(self, param: nn.Parameter, loaded: Loaded) -> None:
        """Fill `param`; padding rows are zero."""
        num_tokens = self.stop - self.start
        shape = (self.vocab_size, param.shape[1])
        copy_into(param[:num_tokens], loaded, shape, (slice(self.start, self.stop),))
        param[num_tokens:].zero_()


class VocabParallelEmbedding(Layer):
    """The embedding table: token ids [T] -> [T, hidden].

    Embeddings are multiplied by `scale`, which is rounded to their type.
    """

    is_plain = True  # whether the table is not quantized

    def __init__(
        self, vocab_size: int, hidden_size: int, ranks: Ranks = ALONE, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.scale = torch.tensor(scale, dtype=torch.get_default_dtype(), device="cpu").item()
        self.shard = VocabularyShard(vocab_size, ranks)
        self.weight = nn.Parameter(
            torch.empty(self.shard.num_rows, hidden_size), requires_grad=False
        )
        # Every rank has adapters for all tokens, and adds them to the sum of all ranks.
        self.rank_part = RankPart.whole(hidden_size, vocab_size)
        self.low_rank: LowRank | None = None

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill `param` with this rank's rows."""
        assert shard_id is None
        self.shard.load(param, loaded)

    def whole_shape(self, param: nn.Parameter, shard_id: int | None) -> tuple[int, ...]:
        assert shard_id is None
        return self.shard.vocab_size, param.shape[1]

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        x = self._look_up(token_ids)
        if self.low_rank and (adapters := adapter_rows()):
            adapters.add_embedding(token_ids, self.low_rank, x)
        return x if self.scale == 1.0 else x * self.scale

    def _look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.ranks.size == 1:
            return F.embedding(token_ids, self.weight)
        if kernels := self.ranks.few(len(token_ids), self.weight):
            return kernels.embedding(token_ids, self.weight, self.shard.start)
        elsewhere = (token_ids < self.shard.start) | (token_ids >= self.shard.stop)
        rows = (token_ids - self.shard.start).masked_fill(elsewhere, 0)
        x = F.embedding(rows, self.weight).masked_fill_(elsewhere[:, None], 0)
        return self.ranks.all_reduce(x)


class ParallelLMHead(LinearBase):
    """The projection to the vocabulary: [T, hidden] -> [T, vocab]; complete only on rank 0.

    Each rank computes its `part` of the columns. Logits are multiplied by `scale`. A `soft_cap` c
    then replaces a logit x by c * tanh(x / c).
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        ranks: Ranks = ALONE,
        weight_format: WeightFormat = DENSE,
        *,
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        shard = VocabularyShard(vocab_size, ranks)
        rows = slice(shard.start, shard.stop)
        part = RankPart((vocab_size,), (rows,), hidden_size, slice(0, hidden_size))
        super().__init__(part, weight_format=weight_format)
        self.ranks, self.shard = ranks, shard
        self.scale, self.soft_cap = scale, soft_cap
        self.is_plain = scale == 1.0 and soft_cap is None

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Use the embedding's table. Most layouts for a device, and quantizing, make a copy."""
        self.weight_format.drop(self)
        self.weight, self.is_tied = embedding.weight, True

    def stored_tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors that the format reads, without the padding rows of an embedding's table."""
        if not self.is_tied:
            return super().stored_tensors()
        return self.weight_format.of_plain(self.get_parameter("weight")[: self.rank_part.num_rows])

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The logits, written to `out` if given."""
        if self.ranks.size == 1:
            return self.part(x, out)
        logits = self.gather(self.part(x))
        return logits if out is None else out.copy_(logits)

    def part(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The logits of this rank's tokens, written to `out` if given."""
        logits = super().forward(x, out)
        return logits if self.is_plain else self._finish(logits)

    def _finish(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale and cap logits in place."""
        logits.mul_(self.scale)
        if self.soft_cap is not None:
            logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return logits

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """All logits on rank 0, joined from the ranks' parts."""
        if padding := self.shard.num_rows - part.shape[1]:
            part = F.pad(part, (0, padding))
        return self.ranks.gather(part)[:, : self.shard.vocab_size]
