"""Experts: parallel feed-forward layers; each token uses a few of them."""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nanovllm.formats.format import (
    DENSE,
    Dense,
    LayerWeight,
    Matrix,
    Rename,
    WeightFormat,
    tensor_of,
)
from nanovllm.formats.names import EXPERTS, stacked_name
from nanovllm.formats.stored import Loaded, RankPart, StoredTensor, check_shape
from nanovllm.kernels.operands.low_rank import LowRank
from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix, same_order, stacked
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.backend import Backend
from nanovllm.layers.context import adapter_rows
from nanovllm.layers.layer import Layer
from nanovllm.layers.linear import matrix_of
from nanovllm.layers.lora import AdapterRows, PairAdapters
from nanovllm.layers.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from nanovllm.kernels.operands.low_rank import LowRank

logger = logging.getLogger("nanovllm")

MATRICES = ("gate_up_proj", "down_proj")  # of each expert
RENAMES: dict[str, Rename] = {matrix: partial(stacked_name, matrix) for matrix in MATRICES}


def near_equal_slice(total: int, ranks: Ranks) -> slice:
    """Return the slice of `total` elements of one rank. Ranks differ by at most one element."""
    return slice(ranks.rank * total // ranks.size, (ranks.rank + 1) * total // ranks.size)


class Experts(Layer):
    """The gated feed-forward layers of all E experts: [T, hidden] -> [T, hidden].

    The ranks split the intermediate dimension of every expert, or each rank holds some `whole`
    experts. In both cases every rank computes on all tokens, which it has from attention, and the
    norm that follows adds up what the ranks return: no token is sent to another rank. A checkpoint
    has three matrices for each expert, which `projections` names. `shard_id` numbers the tensors
    that make up a parameter, through all experts; it is None for a tensor that holds those of all
    of them.
    """

    kernels: Kernels = PLAIN
    activation: Callable[[torch.Tensor], torch.Tensor] | None = None  # of gate and up; None: silu
    num_inner = 2  # the projections before the activation: gate and up

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        ranks: Ranks = ALONE,
        whole: bool = False,
        formats: Mapping[str, WeightFormat] | None = None,
        projections: Mapping[str, tuple[str, ...]] = EXPERTS,
    ) -> None:
        super().__init__()
        self.projections = projections
        self.ranks = ranks
        self.dtype = torch.get_default_dtype()
        self.num_experts = num_experts
        self.experts, inner = slice(0, num_experts), slice(0, intermediate_size)
        if whole:
            self.experts = near_equal_slice(num_experts, ranks)
        else:
            inner = ranks.equal_slice(intermediate_size)
        everything = slice(0, hidden_size)
        parts = {
            "gate_up_proj": RankPart(
                (intermediate_size,) * self.num_inner,
                (inner,) * self.num_inner,
                hidden_size,
                everything,
            ),
            "down_proj": RankPart((hidden_size,), (everything,), intermediate_size, inner),
        }
        self.formats = formats or dict.fromkeys(parts, DENSE)
        self.rank_parts = {
            name: self.formats[name].register(self, part, (self.num_own,), RENAMES[name])
            for name, part in parts.items()
        }
        self.matrices: tuple[list[Matrix], list[Matrix]] | None = None
        self.operands: tuple[Any, Any] | None = None
        self.low_ranks: dict[str, LowRank] = {}  # of adapters, by matrix, if there is room for some

    @property
    def num_own(self) -> int:
        """The number of experts that this rank has, in full or in part."""
        return self.experts.stop - self.experts.start

    def parts(self, name: str) -> list[str]:
        """The checkpoint's names for the tensors of each expert that make up `name`."""
        matrix, param = next(
            (matrix, leaf)
            for matrix, each in self.formats.items()
            for leaf in each.filled
            if RENAMES[matrix](leaf) == name
        )
        leaf, projection = tensor_of(param)
        kinds = self.projections[matrix]
        chosen = kinds if projection is None else kinds[projection : projection + 1]
        return [f"{i}.{kind}.{leaf}" for i in range(self.num_experts) for kind in chosen]

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill an expert's part of `param`, or all of it from one stack of tensors.

        The tensor of an expert on another rank is not read; only its shape is checked.
        """
        assert isinstance(param, StoredTensor)
        stored, part = param.stored, param.rank_part
        if shard_id is None:
            check_shape(loaded, (self.num_experts, *stored.shape(part.stored_size(stored))))
            for expert in range(self.experts.start, self.experts.stop):
                self._load_one(param, Item(loaded, expert), expert, None)
            return
        described = part.projections(stored)
        expert, number = divmod(shard_id, len(described))
        projection = described[number]
        if self.experts.start <= expert < self.experts.stop:
            self._load_one(param, loaded, expert, projection)
        else:
            shape = stored.shape(part.stored_size(stored, projection))
            check_shape(stored.spelt(loaded), shape)

    def _load_one(
        self, param: StoredTensor, loaded: Loaded, expert: int, projection: int | None
    ) -> None:
        index = expert - self.experts.start
        name = next(name for name, part in self.rank_parts.items() if part is param.rank_part)
        tensors = {leaf: stack[index] for leaf, stack in self.stored_tensors(name).items()}
        self.formats[name].load(param, param[index], loaded, projection, tensors)

    def whole_shape(self, param: nn.Parameter, shard_id: int | None) -> tuple[int, ...]:
        assert isinstance(param, StoredTensor)
        if shard_id is None:
            return (self.num_experts, *param.whole_shape()[1:])
        described = param.rank_part.projections(param.stored)
        return param.whole_shape(described[shard_id % len(described)])[1:]

    def stored_tensors(self, name: str) -> Mapping[str, torch.Tensor]:
        """The tensors of the matrices `name`, stacked, by the format's names."""
        return self.formats[name].registered(self, RENAMES[name])

    def bind(self, backend: Backend) -> None:
        """Replace the checkpoint's tensors with what the kernels read. A second call does nothing.

        Peak memory: two copies of the experts' gate_up_proj, or of their down_proj.
        """
        self.kernels = backend.kernels
        if self.matrices is None and self.operands is None:
            if not self.kernels.reads_stacks:
                self.matrices = self._matrices("gate_up_proj"), self._matrices("down_proj")
            else:
                self.operands = self._operand("gate_up_proj"), self._operand("down_proj")

    def _matrices(self, name: str) -> list[Matrix]:
        """A matrix for each expert. The parameters are dropped."""
        weights = self._weights(name)
        return [matrix_of(weight, self.kernels) for weight in weights]

    def _weights(self, name: str) -> Iterator[LayerWeight]:
        """The weight of each expert. The parameters are dropped."""
        stacks = self.stored_tensors(name)
        self.formats[name].drop(self, RENAMES[name])
        for i in range(self.num_own):
            tensors = {leaf: stack[i] for leaf, stack in stacks.items()}
            yield self.formats[name].weight(tensors, self.rank_parts[name])

    def _operand(self, name: str) -> Any:
        """The operand of the kernels for all experts. The parameters are dropped."""
        if isinstance(self.formats[name], Dense):
            (stack,) = self.stored_tensors(name).values()
            self.formats[name].drop(self, RENAMES[name])
            return stack
        return self._stack_of(name, list(self._weights(name)))

    def _stack_of(self, name: str, weights: list[LayerWeight]) -> Any:
        """The operand of these weights, which are not plain."""
        alike = [weight for weight in weights if isinstance(weight, QuantizedMatrix)]
        if len(alike) == len(weights) and same_order(alike):
            return self.kernels.arrange(stacked(alike))
        from nanovllm.formats.mixed import dense

        logger.warning("experts with weights of several kinds are kept in %s", self.dtype)
        size_in = self.rank_parts[name].num_columns
        return torch.stack([dense(weight, size_in, self.dtype) for weight in weights])

    def forward(
        self, x: torch.Tensor, expert_ids: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        """For each row of x, this rank's part of its experts' sum, weighted by `shares` [T, K]."""
        if self.experts.start:
            expert_ids = expert_ids - self.experts.start
        if self.low_ranks and (adapters := adapter_rows()):
            return self._forward_adapted(x, expert_ids, shares, adapters)
        if self.matrices is not None:
            gate_up, down = self.matrices
            return self.kernels.experts(
                x, gate_up, down, expert_ids, shares, self.num_experts,
                linear=lambda x, matrix: matrix.linear(x), **self._options(),
            )  # fmt: skip
        # Before `bind`, plain PyTorch multiplies by dense weights.
        operands: tuple[Any, Any] = self.operands or (self.gate_up_proj, self.down_proj)
        return self.kernels.experts(
            x, *operands, expert_ids, shares, self.num_experts, **self._options()
        )

    def _options(self) -> dict[str, Any]:
        """The kernels' option of an activation. Kernels that read stacks have silu themselves."""
        if self.activation is not None:
            return {"activation": self.activation}
        return {} if self.matrices is None else {"activation": self.kernels.silu_and_mul}

    def _forward_adapted(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        shares: torch.Tensor,
        adapters: AdapterRows,
    ) -> torch.Tensor:
        """As `forward`, with adapters. Ids count from this rank's first expert."""
        pairs = adapters.of_pairs(expert_ids, self.num_own)
        additions = PairAdapters(pairs, *(self.low_ranks[name] for name in MATRICES))
        if self.matrices is not None:
            return self.kernels.adapted_experts(
                x, *self.matrices, expert_ids, shares, self.num_experts, additions,
                linear=lambda x, matrix: matrix.linear(x), **self._options(),
            )  # fmt: skip
        operands: tuple[Any, Any] = self.operands or (self.gate_up_proj, self.down_proj)
        return self.kernels.adapted_experts(
            x, *operands, expert_ids, shares, self.num_experts, additions, **self._options()
        )


class Item:
    """One tensor of a loaded stack."""

    def __init__(self, stack: Loaded, index: int) -> None:
        self._stack, self._index = stack, index

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._stack.shape)[1:]

    def __getitem__(self, index: Any) -> torch.Tensor:
        inside = index if isinstance(index, tuple) else (index,)
        place = (self._index, *inside)
        return self._stack[place]
