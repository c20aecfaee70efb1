"""LatentExpansion: makes keys and values of latents, or folds it into queries and outputs."""

import torch

from nanovllm.formats.format import DENSE, DenseMatrix, WeightFormat
from nanovllm.kernels.operands.low_rank import LowRank
from nanovllm.layers.backend import Backend
from nanovllm.layers.context import adapter_rows
from nanovllm.layers.latent_sizes import LatentSizes
from nanovllm.layers.linear import MergedColumnParallelLinear
from nanovllm.layers.ranks import ALONE, Ranks


class LatentExpansion(MergedColumnParallelLinear):
    """The layer that makes each head's key and value of a latent, `kv_b_proj` in checkpoints.

    A key's product with a query is the latent's product with the query that is multiplied by the
    layer's weight: `fold` makes such queries, and `unfold` the outputs of sums of latents. Both
    read the weight as checkpoints have it, [H, plain + value, rank]. Quantized weights are
    dequantized by `bind`, and plain ones are not quantized while they are loaded.
    """

    def __init__(
        self, sizes: LatentSizes, ranks: Ranks = ALONE, weight_format: WeightFormat = DENSE
    ) -> None:
        if weight_format.scheme is not None and weight_format.scheme.while_loading:
            weight_format = DENSE
        super().__init__(sizes.rank, [sizes.expanded_size], False, ranks, weight_format)
        self.plain, self.head_size = sizes.plain, sizes.plain + sizes.value
        self.dtype = torch.get_default_dtype()

    def bind(self, backend: Backend) -> None:  # noqa: ARG002
        """Keep a plain weight, which is not arranged. A second call does nothing."""
        if self.matrix is None:
            weight = self._plain_weight()
            self.weight_format.drop(self)
            self.matrix = DenseMatrix(weight)

    def fold(self, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Queries' plain parts [T, H, plain] -> `out` [T, H, rank], to multiply latents by."""
        weight = self._heads()[:, : self.plain]
        torch.bmm(queries.transpose(0, 1), weight, out=out.transpose(0, 1))
        if self.low_rank and (adapters := adapter_rows()):
            a, b, is_own = _own_ranks(self.low_rank, adapters.slots)
            down = torch.einsum("thd,shd->ths", queries, self._of_heads(b)[..., : self.plain])
            out += (down * is_own) @ a

    def unfold(self, sums: torch.Tensor) -> torch.Tensor:
        """Weighted sums of latents [T, H, rank] -> the heads' outputs [T, H, value]."""
        weight = self._heads()[:, self.plain :].mT
        values = torch.bmm(sums.transpose(0, 1), weight).transpose(0, 1)
        if self.low_rank and (adapters := adapter_rows()):
            a, b, is_own = _own_ranks(self.low_rank, adapters.slots)
            down = (sums @ a.mT) * is_own
            values = values + torch.einsum(
                "ths,shd->thd", down, self._of_heads(b)[..., self.plain :]
            )
        return values

    def _heads(self) -> torch.Tensor:
        """The weight [H, plain + value, rank]."""
        matrix = self.matrix
        weight = self._plain_weight() if matrix is None else matrix.plain()
        assert weight is not None
        return weight.view(-1, self.head_size, weight.shape[1])

    def _of_heads(self, b: torch.Tensor) -> torch.Tensor:
        """Rows of all heads [S, H * (plain + value)] as [S, H, plain + value]."""
        return b.view(len(b), -1, self.head_size)

    def _plain_weight(self) -> torch.Tensor:
        weight = self.weight_format.weight(self.stored_tensors(), self.rank_part)
        if isinstance(weight, torch.Tensor):
            return weight
        from nanovllm.formats.mixed import dense

        return dense(weight, self.rank_part.num_columns, self.dtype)


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
