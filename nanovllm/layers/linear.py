"""Linear layers, named by how the ranks of a tensor-parallel model split them.

A layer knows which part of its matrix this rank holds; its format knows which tensors of a
checkpoint describe that part, and `matrix_of` how to multiply by it on this device.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nanovllm.formats.format import (
    DENSE,
    DenseMatrix,
    LayerWeight,
    Matrix,
    PackedMatrix,
    Weight,
    WeightFormat,
)
from nanovllm.formats.stored import ROWS, Loaded, RankPart, Stored, StoredTensor
from nanovllm.kernels.table import PLAIN, Kernels, Rounding
from nanovllm.layers.backend import Backend
from nanovllm.layers.context import adapter_rows
from nanovllm.layers.layer import Layer
from nanovllm.layers.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from nanovllm.kernels.operands.low_rank import LowRank

BIAS = Stored((ROWS,), fill=lambda values, *_: values.zero_())


def matrix_of(
    weight: LayerWeight, kernels: Kernels, is_table: bool = False, has_bias: bool = False
) -> Matrix:
    """The fastest form of a weight [N, K] here. Peak memory: up to three times the weight.

    A plain table's rows are not copied if the kernels can multiply them where they are.
    """
    if isinstance(weight, list):
        from nanovllm.formats.layouts import JoinedMatrix

        matrices = [matrix_of(w, kernels, has_bias=has_bias) for w in weight]
        return JoinedMatrix(matrices, [_num_rows(w) for w in weight])
    if not _num_rows(weight):
        from nanovllm.formats.layouts import EmptyMatrix

        return EmptyMatrix()
    if not isinstance(weight, torch.Tensor):
        from nanovllm.formats.layouts import in_layout

        return in_layout(weight, kernels)
    if not weight.numel():
        return DenseMatrix(weight)
    if (operand := kernels.arrange_plain(weight, is_table, has_bias)) is not None:
        from nanovllm.formats.layouts import KernelMatrix

        return KernelMatrix(operand, kernels)
    if not kernels.reads_plain and weight.device.type == "cpu":
        from nanovllm.kernels.plain.packed_linear import can_pack

        if can_pack(weight):
            return PackedMatrix(weight)
    return DenseMatrix(weight)


def _num_rows(weight: Weight) -> int:
    return len(weight if isinstance(weight, torch.Tensor) else weight.codes)


class LinearBase(Layer):
    """`x @ weight.T + bias`. `bind` replaces the checkpoint's tensors with `matrix`."""

    is_tied = False  # whether the weight is an embedding's table

    def __init__(
        self, part: RankPart, bias: bool = False, weight_format: WeightFormat = DENSE
    ) -> None:
        super().__init__()
        self.weight_format = weight_format
        self.rank_part = weight_format.register(self, part)
        self.bias: nn.Parameter | None = part.new(BIAS) if bias else None
        if self.bias is not None:
            self.bias.data.zero_()
        self.matrix: Matrix | None = None
        self.low_rank: LowRank | None = None  # of adapters, if the layer has room for some

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill the part of projection `shard_id`, or all if the checkpoint has them fused."""
        assert isinstance(param, StoredTensor)
        tensors = self.stored_tensors()
        self.weight_format.load(param, param, loaded, shard_id, tensors)

    def whole_shape(self, param: nn.Parameter, shard_id: int | None) -> tuple[int, ...]:
        assert isinstance(param, StoredTensor)
        return param.whole_shape(shard_id)

    def stored_tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors that the format reads."""
        return self.weight_format.registered(self)

    def bind(self, backend: Backend) -> None:
        """Replace the checkpoint's tensors with the matrix. A second call does nothing.

        Peak memory: two copies of this layer's weight, while its layout changes.
        """
        if self.matrix is None:
            weight = self.weight_format.weight(self.stored_tensors(), self.rank_part)
            self.weight_format.drop(self)
            has_bias = self.added_bias is not None
            self.matrix = matrix_of(weight, backend.kernels, self.is_tied, has_bias)

    @property
    def operand_and_bias(self) -> tuple[Any, torch.Tensor | None]:
        """The operands of kernels that fuse other operations with the layer's, once it is bound."""
        assert self.matrix is not None
        return self.matrix.operand, self.added_bias

    @property
    def added_bias(self) -> torch.Tensor | None:
        """The bias that this rank adds."""
        return self.bias

    def rounding(self, x: torch.Tensor) -> Rounding | None:
        """How the kernel before this layer may round len(x) rows; None if it must not round.

        Steps with adapters need rows that are not rounded.
        """
        if self.matrix is None or (self.low_rank and adapter_rows()):
            return None
        return self.matrix.rounding(x)

    def forward(self, x: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """The outputs of rows x, written to `out` if given."""
        if self.low_rank and (adapters := adapter_rows()):
            return adapters.add(x, self.low_rank, lambda: self.linear(x, self.added_bias, out))
        return self.linear(x, self.added_bias, out)

    def linear(
        self, x: Any, bias: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply by the matrix and add `bias`. Before `bind`, with plain PyTorch."""
        if self.matrix is not None:
            return self.matrix.linear(x, bias, out)
        weight = self.weight_format.weight(self.stored_tensors(), self.rank_part)
        plain = (
            DenseMatrix(weight) if isinstance(weight, torch.Tensor) else matrix_of(weight, PLAIN)
        )
        return plain.linear(x, bias, out)


class ReplicatedLinear(LinearBase):
    """A linear layer that is whole on every rank."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        weight_format: WeightFormat = DENSE,
    ) -> None:
        super().__init__(RankPart.whole(out_features, in_features), bias, weight_format)


class RowParallelLinear(LinearBase):
    """A linear layer with inputs that the ranks split: [T, in / size] -> [T, out].

    The output is the sum of the ranks' results, which the next norm adds up. Only rank 0 adds the
    bias.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        ranks: Ranks = ALONE,
        weight_format: WeightFormat = DENSE,
    ) -> None:
        rows, columns = slice(0, out_features), ranks.equal_slice(in_features)
        super().__init__(
            RankPart((out_features,), (rows,), in_features, columns), bias, weight_format
        )
        self.ranks = ranks

    @property
    def added_bias(self) -> torch.Tensor | None:
        return self.bias if self.ranks.rank == 0 else None


class MergedColumnParallelLinear(LinearBase):
    """Several projections of one input as one matrix; `shard_id` is a projection's index, or None.

    Each projection is split by itself, so that a rank has a part of every one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: list[int],
        bias: bool = False,
        ranks: Ranks = ALONE,
        weight_format: WeightFormat = DENSE,
    ) -> None:
        parts = tuple(ranks.equal_slice(n) for n in out_features)
        part = RankPart(tuple(out_features), parts, in_features, slice(0, in_features))
        super().__init__(part, bias, weight_format)


class QKVParallelLinear(LinearBase):
    """Query, key and value projections as one matrix: [T, hidden] -> [T, (H + 2 * KVH) * D].

    H and KVH are this rank's heads. With fewer key heads than ranks, several ranks have the same
    one.
    """

    def __init__(
        self, hidden_size: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool,
        ranks: Ranks = ALONE, weight_format: WeightFormat = DENSE,
    ) -> None:  # fmt: skip
        heads = ranks.equal_slice(num_heads)
        first = ranks.rank * num_kv_heads // ranks.size
        kv_heads = slice(first, first + max(1, num_kv_heads // ranks.size))
        parts = tuple(
            slice(part.start * head_dim, part.stop * head_dim)
            for part in (heads, kv_heads, kv_heads)
        )
        sizes = tuple(n * head_dim for n in (num_heads, num_kv_heads, num_kv_heads))
        part = RankPart(sizes, parts, hidden_size, slice(0, hidden_size))
        super().__init__(part, bias, weight_format)
        self.num_heads = heads.stop - heads.start
        self.num_kv_heads = kv_heads.stop - kv_heads.start
