"""An embedding whose table is stored in blocks, and the head that shares it."""

from collections.abc import Mapping

import torch

from nanovllm.formats.format import Matrix, WeightFormat
from nanovllm.formats.layouts import BlocksMatrix
from nanovllm.formats.stored import Loaded, RankPart, StoredTensor
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.backend import Backend
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.linear import matrix_of
from nanovllm.layers.ranks import Ranks


class StoredEmbedding(VocabParallelEmbedding):
    """An embedding whose rows are converted when they are looked up.

    `bind` replaces the checkpoint's tensors with `matrix`.
    """

    is_plain = False

    def __init__(
        self, vocab_size: int, hidden_size: int, ranks: Ranks, weight_format: WeightFormat,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        with torch.device("meta"):  # the plain table, which is replaced
            super().__init__(vocab_size, hidden_size, ranks, scale)
        rows = slice(self.shard.start, self.shard.stop)
        self.table_part = RankPart((vocab_size,), (rows,), hidden_size, slice(0, hidden_size))
        self.weight_format, self.dtype = weight_format, torch.get_default_dtype()
        self.matrix: Matrix | None = None
        weight_format.register(self, self.table_part)

    def weight_loader(
        self, param: torch.nn.Parameter, loaded: Loaded, shard_id: int | None
    ) -> None:
        assert isinstance(param, StoredTensor)
        self.weight_format.load(param, param, loaded, shard_id, self._tensors())

    def whole_shape(self, param: torch.nn.Parameter, shard_id: int | None) -> tuple[int, ...]:
        assert isinstance(param, StoredTensor)
        return param.whole_shape(shard_id)

    def bind(self, backend: Backend) -> None:
        """Replace the checkpoint's tensors with the matrix. A second call does nothing."""
        if self.matrix is None:
            self.matrix = self.bound(backend.kernels)
            self.weight_format.drop(self)

    def bound(self, kernels: Kernels) -> Matrix:
        """The table as these kernels read it; after `bind`, as it is."""
        if self.matrix is not None:
            return self.matrix
        return matrix_of(self.weight_format.weight(self._tensors(), self.table_part), kernels)

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return self.weight_format.registered(self)

    def _look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        matrix = self.bound(PLAIN)
        if self.ranks.size == 1:
            return self._rows(matrix, token_ids)
        elsewhere = (token_ids < self.shard.start) | (token_ids >= self.shard.stop)
        rows = self._rows(matrix, (token_ids - self.shard.start).masked_fill(elsewhere, 0))
        return self.ranks.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))

    def _rows(self, matrix: Matrix, rows: torch.Tensor) -> torch.Tensor:
        if isinstance(matrix, BlocksMatrix):
            return matrix.rows(rows, self.dtype)
        size = len(rows), self.table_part.in_features  # this rank has no rows
        return torch.zeros(size, dtype=self.dtype, device=rows.device)


class TiedHead(ParallelLMHead):
    """The projection to the vocabulary by an embedding's table, which is not copied."""

    def __init__(
        self, embedding: StoredEmbedding, scale: float = 1.0, soft_cap: float | None = None
    ) -> None:
        part = embedding.table_part
        with torch.device("meta"):  # a weight of its own, which is dropped
            super().__init__(
                part.sizes[0], part.in_features, embedding.ranks, scale=scale, soft_cap=soft_cap
            )
        self.weight_format.drop(self)
        self.is_tied = True
        self._embeddings = (embedding,)  # in a tuple: the head does not own it

    def stored_tensors(self) -> Mapping[str, torch.Tensor]:
        return {}

    def bind(self, backend: Backend) -> None:
        self._embeddings[0].bind(backend)
        self.matrix = self._embeddings[0].matrix

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._embeddings[0].bound(PLAIN).linear(x, bias, out)


def tied_head(
    embedding: VocabParallelEmbedding, scale: float, soft_cap: float | None
) -> ParallelLMHead:
    """The projection that shares an embedding's stored table."""
    assert isinstance(embedding, StoredEmbedding)
    return TiedHead(embedding, scale, soft_cap)
