"""Experts: parallel feed-forward layers, of which each token uses a few."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nanovllm.kernels.plain.experts import experts as plain_experts
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.backend import Backend
from nanovllm.layers.layer import Layer, Loaded, check_shape
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.layers.weights.format import DENSE, WeightFormat
from nanovllm.layers.weights.matrix import Matrix, matrix_of
from nanovllm.layers.weights.stored import Held, StoredTensor

# The checkpoint's names for the projections of each expert that make up a matrix.
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Experts(Layer):
    """The gated feed-forward layers of all E experts: [T, hidden] -> [T, hidden].

    The ranks split the intermediate dimension of every expert, or each rank holds some `whole`
    experts. In both cases every rank computes on all tokens, which it has from attention, and the
    ranks add up their outputs: no token is sent to another rank. A checkpoint has three matrices
    for each expert. `shard_id` numbers the tensors that make up a parameter, through all experts;
    it is None for a tensor that holds those of all of them.
    """

    kernels: Kernels = PLAIN

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        ranks: Ranks = ALONE,
        whole: bool = False,
        weight_format: WeightFormat = DENSE,
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.num_experts = num_experts
        self.experts, inner = slice(0, num_experts), slice(0, intermediate_size)
        if whole:
            self.experts = ranks.near_equal_slice(num_experts)
        else:
            inner = ranks.equal_slice(intermediate_size)
        everything = slice(0, hidden_size)
        self.held = {
            "gate_up_proj": Held(
                (intermediate_size, intermediate_size), (inner, inner), hidden_size, everything
            ),
            "down_proj": Held((hidden_size,), (everything,), intermediate_size, inner),
        }
        self.weight_format = weight_format
        for name, held in self.held.items():
            for leaf, stored in weight_format.tensors.items():
                self.register_parameter(_joined(name, leaf), held.new(stored, (self.num_held,)))
        self.matrices: tuple[list[Matrix], list[Matrix]] | None = None
        self.operands: tuple[Any, Any] | None = None

    @property
    def num_held(self) -> int:
        """The number of experts of which this rank holds something."""
        return self.experts.stop - self.experts.start

    def parts(self, name: str) -> list[str]:
        """The checkpoint's names for the tensors of each expert that make up `name`."""
        matrix, leaf = next(
            (matrix, leaf)
            for matrix in PROJECTIONS
            for leaf in self.weight_format.tensors
            if _joined(matrix, leaf) == name
        )
        kinds = PROJECTIONS[matrix]
        return [f"{i}.{kind}.{leaf}" for i in range(self.num_experts) for kind in kinds]

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill an expert's part of `param`, or all of it from one stack of tensors.

        The tensor of an expert on another rank is not read; only its shape is checked.
        """
        assert isinstance(param, StoredTensor)
        held, stored = param.held, param.stored
        if shard_id is None:
            held.load(stored, param, loaded, None, (self.num_experts, self.experts))
            return
        expert, projection = divmod(shard_id, len(held.sizes))
        if self.experts.start <= expert < self.experts.stop:
            held.load(stored, param[expert - self.experts.start], loaded, projection)
        else:
            check_shape(loaded, stored.shape(held.sizes[projection], held.in_features))

    def stored_tensors(self, name: str) -> Mapping[str, torch.Tensor]:
        """The parameters of the matrices `name`, stacked, by the format's names."""
        return {leaf: getattr(self, _joined(name, leaf)) for leaf in self.weight_format.tensors}

    def bind(self, backend: Backend) -> None:
        """Replace the checkpoint's tensors with what the kernels read. A second call does nothing.

        Peak memory: the experts' gate_up_proj, or their down_proj, are held twice.
        """
        self.kernels = backend.kernels
        if self.matrices is None and self.operands is None:
            if self.kernels.experts is plain_experts:
                self.matrices = self._matrices("gate_up_proj"), self._matrices("down_proj")
            else:
                self.operands = self._operand("gate_up_proj"), self._operand("down_proj")

    def _matrices(self, name: str) -> list[Matrix]:
        """A matrix for each expert. The parameters are dropped."""
        stacks = self.stored_tensors(name)
        self._drop(name)
        return [
            matrix_of(self._weight(name, {leaf: t[i] for leaf, t in stacks.items()}), self.kernels)
            for i in range(self.num_held)
        ]

    def _operand(self, name: str) -> Any:
        """What the kernels read for all experts. The parameters are dropped."""
        weight = self._weight(name, self.stored_tensors(name))
        self._drop(name)
        return weight if isinstance(weight, torch.Tensor) else self.kernels.arrange(weight)

    def _weight(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Any:
        return self.weight_format.weight(tensors, self.held[name])

    def _drop(self, name: str) -> None:
        for leaf in self.weight_format.tensors:
            setattr(self, _joined(name, leaf), None)

    def forward(
        self, x: torch.Tensor, expert_ids: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        """For each row of x, the sum of its experts' outputs, weighted by `shares` [T, K]."""
        if self.experts.start:
            expert_ids = expert_ids - self.experts.start
        if self.matrices is not None:
            gate_up, down = self.matrices
            out = plain_experts(
                x, gate_up, down, expert_ids, shares, self.num_experts,
                linear=lambda x, matrix: matrix.linear(x),
            )  # fmt: skip
        else:
            # Before `bind`, plain PyTorch multiplies by dense weights.
            operands: tuple[Any, Any] = self.operands or (self.gate_up_proj, self.down_proj)
            out = self.kernels.experts(x, *operands, expert_ids, shares, self.num_experts)
        return self.ranks.all_reduce(out)


def _joined(matrix: str, leaf: str) -> str:
    """The parameter of a matrix for a tensor of the format, as files with stacks name it."""
    return matrix + (leaf.removeprefix("weight") if leaf.startswith("weight") else f"_{leaf}")
