"""LatentExpansion: makes keys and values of latents, or folds it into queries and outputs."""

import torch

from nanovllm.formats.format import DENSE, WeightFormat
from nanovllm.kernels.operands.low_rank import LowRank
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.backend import Backend
from nanovllm.layers.context import adapter_rows
from nanovllm.layers.head_matrices import HeadMatrices
from nanovllm.layers.latent_sizes import LatentSizes
from nanovllm.layers.linear import MergedColumnParallelLinear
from nanovllm.layers.ranks import ALONE, Ranks


class LatentExpansion(MergedColumnParallelLinear):
    """The layer that makes each head's key and value of a latent, `kv_b_proj` in checkpoints.

    A key's product with a query is the latent's product with the query that is multiplied by the
    layer's weight: `fold` makes such queries, and `unfold` the outputs of sums of latents.
    Quantized weights are dequantized by `bind`, and plain ones are not quantized while they are
    loaded.
    """

    def __init__(
        self, sizes: LatentSizes, ranks: Ranks = ALONE, weight_format: WeightFormat = DENSE
    ) -> None:
        if weight_format.scheme is not None and weight_format.scheme.while_loading:
            weight_format = DENSE
        super().__init__(sizes.rank, [sizes.expanded_size], False, ranks, weight_format)
        self.plain, self.head_size = sizes.plain, sizes.plain + sizes.value
        self.dtype = torch.get_default_dtype()

    def bind(self, backend: Backend) -> None:
        """Make the matrices of heads. A second call does nothing.

        Peak memory: two copies of the layer's weight; three in one order of sums.
        """
        if self.matrix is None:
            matrix = self._of_stored(backend.kernels)
            self.weight_format.drop(self)
            if backend.kernels.avoids_pytorch:
                from nanovllm.layers.tiled_heads import TiledHeadMatrices

                matrix = TiledHeadMatrices(matrix.keys, matrix.values, backend.kernels)
            self.matrix = matrix

    def fold(self, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Queries' plain parts [T, H, plain] -> `out` [T, H, rank], to multiply latents by."""
        self._of_heads().fold(queries, out)
        if self.low_rank and (adapters := adapter_rows()):
            a, b, is_own = _own_ranks(self.low_rank, adapters.slots)
            down = torch.einsum("thd,shd->ths", queries, self._rows(b)[..., : self.plain])
            out += (down * is_own) @ a

    def unfold(self, sums: torch.Tensor) -> torch.Tensor:
        """Weighted sums of latents [T, H, rank] -> the heads' outputs [T, H, value]."""
        values = self._of_heads().unfold(sums)
        if self.low_rank and (adapters := adapter_rows()):
            a, b, is_own = _own_ranks(self.low_rank, adapters.slots)
            down = (sums @ a.mT) * is_own
            up = self._rows(b)[..., self.plain :]
            values = values + torch.einsum("ths,shd->thd", down, up)
        return values

    def _of_heads(self) -> HeadMatrices:
        matrix = self.matrix or self._of_stored()
        assert isinstance(matrix, HeadMatrices)
        return matrix

    def _of_stored(self, kernels: Kernels = PLAIN) -> HeadMatrices:
        weight = self.weight_format.weight(self.stored_tensors(), self.rank_part)
        if not isinstance(weight, torch.Tensor):
            from nanovllm.formats.mixed import dense

            weight = dense(weight, self.rank_part.num_columns, self.dtype)
        heads = weight.view(-1, self.head_size, weight.shape[1])
        return HeadMatrices(heads[:, : self.plain], heads[:, self.plain :], kernels)

    def _rows(self, b: torch.Tensor) -> torch.Tensor:
        """Rows of all heads [S, H * (plain + value)] as [S, H, plain + value]."""
        return b.view(len(b), -1, self.head_size)


def _own_ranks(
    low_rank: LowRank, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The matrices A [S, K] and B [S, N] of all slots together; and which of S each row uses.

    The last result [T, 1, S] has ones and zeros. Nothing here waits for the device. It costs as
    much as if every row used all slots.
    """
    num_slots, size = len(low_rank.a), low_rank.max_rank
    ranks = torch.arange(size, device=slots.device)
    is_own = slots[:, None, None] == torch.arange(num_slots, device=slots.device)[:, None]
    is_own = is_own & (ranks < low_rank.ranks[:, :1])
    return low_rank.a.flatten(0, 1), low_rank.b.flatten(0, 1), is_own.view(len(slots), 1, -1)
