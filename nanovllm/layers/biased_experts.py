"""Experts with biases and a clamped gate, as in gpt-oss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.formats.block_format import BlockFormat
from nanovllm.formats.format import Dense, LayerWeight, WeightFormat
from nanovllm.formats.in_turn import DenseInTurn, load_in_turn
from nanovllm.formats.quantize import WhileLoading
from nanovllm.formats.stored import Loaded, RankPart, StoredTensor
from nanovllm.kernels.operands.block_types import BLOCK_TYPES
from nanovllm.kernels.operands.expert_biases import ExpertBiases
from nanovllm.kernels.operands.routing import Routing
from nanovllm.layers.context import adapter_rows
from nanovllm.layers.experts import MATRICES, Experts
from nanovllm.layers.feed_forward import FeedForward
from nanovllm.layers.file_order import RowsInTurn
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import BIAS
from nanovllm.layers.lora import PairAdapters
from nanovllm.layers.sparse_mlp import ExpertRouter

BLOCK = BLOCK_TYPES["MXFP4"].size


@dataclass(frozen=True)
class BiasedSizes:
    """The sizes of a layer of experts, and the numbers of its gate: see `ExpertBiases`.

    A token uses `per_token` of the experts. `in_turn` says whether files have stacks of tensors,
    with the rows of gate and up in turn.
    """

    num_experts: int
    per_token: int
    intermediate_size: int
    alpha: float
    limit: float
    in_turn: bool = True


class BiasedExperts(Experts, RowsInTurn):
    """Experts with biases. Files may have stacks of tensors, with rows of gate and up in turn.

    Plain matrices [in, out] of such stacks are turned while they are loaded. In GGUF files, gate
    and up are stacks of their own, with the usual names. If ranks split each expert, only rank 0
    adds the bias of the last product.
    """

    def __init__(self, make: Build, hidden_size: int, sizes: BiasedSizes) -> None:
        found = make.formats.of_experts(sizes.num_experts)
        self.in_turn = sizes.in_turn
        super().__init__(
            sizes.num_experts, hidden_size, sizes.intermediate_size, make.ranks,
            make.whole_experts, _supported(found, self.in_turn),
            make.formats.names.experts,
        )  # fmt: skip
        self.sizes = sizes
        for name, part in self.rank_parts.items():
            bias = part.new(BIAS, (self.num_own,))
            bias.data.zero_()
            self.register_parameter(_bias(name), bias)
        self.adds_last_bias = make.whole_experts or make.ranks.rank == 0

    def parts(self, name: str) -> list[str]:
        """The names of each expert's tensors; none if files have the projections in turn."""
        if self.in_turn:
            return []
        for matrix, kinds in self.projections.items():
            if name == _bias(matrix):
                return [f"{i}.{kind}.bias" for i in range(self.num_experts) for kind in kinds]
        return super().parts(name)

    def _load_one(
        self, param: StoredTensor, loaded: Loaded, expert: int, projection: int | None
    ) -> None:
        if param.stored is not BIAS:
            super()._load_one(param, loaded, expert, projection)
            return
        target = param[expert - self.experts.start]
        if projection is None and self.in_turn:
            load_in_turn(param.rank_part, BIAS, target, loaded)
        else:
            param.rank_part.load(BIAS, target, loaded, projection)

    def _stack_of(self, name: str, weights: list[LayerWeight]) -> Any:
        """The operand of these weights; MXFP4 in whole blocks stays as it is stored."""
        if all(_is_whole_mxfp4(self.formats[each], self.rank_parts[each]) for each in MATRICES):
            return self.kernels.arrange_mx_experts(weights)
        return super()._stack_of(name, weights)

    def forward(
        self, x: torch.Tensor, expert_ids: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        """For each row of x, this rank's part of its experts' sum, weighted by `shares` [T, K]."""
        if self.experts.start:
            expert_ids = expert_ids - self.experts.start
        gate_up, down = (self.get_parameter(_bias(name)) for name in MATRICES)
        biases = ExpertBiases(
            gate_up, down if self.adds_last_bias else None, self.sizes.alpha, self.sizes.limit
        )
        options: dict[str, Any] = {} if self.matrices is None else {"linear": _linear}
        if self.low_ranks and (adapters := adapter_rows()):
            pairs = adapters.of_pairs(expert_ids, self.num_own)
            options["additions"] = PairAdapters(pairs, *(self.low_ranks[m] for m in MATRICES))
        # Before `bind`, plain PyTorch multiplies by dense weights.
        operands: tuple[Any, Any] = (
            self.matrices or self.operands or (self.gate_up_proj, self.down_proj)
        )
        return self.kernels.biased_experts(
            x, *operands, expert_ids, shares, self.num_experts, biases, **options
        )


class BiasedSparseMLP(FeedForward):
    """Experts with biases, and the router that selects some of them, with a share for each."""

    def __init__(self, make: Build, hidden_size: int, sizes: BiasedSizes) -> None:
        super().__init__()
        routing = Routing(per_token=sizes.per_token, normalized=True, scores="softmax of chosen")
        self.router = ExpertRouter(
            hidden_size, sizes.num_experts, routing, make.formats.in_float32("router"), bias=True
        )
        self.experts = BiasedExperts(make, hidden_size, sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, expert_ids = self.router.select(x)
        out: torch.Tensor = self.experts(x, expert_ids, shares)
        return out


def _is_whole_mxfp4(stored_as: WeightFormat, part: RankPart) -> bool:
    """Whether a rank's matrices are in MXFP4 and neither begin nor end inside of a block."""
    if not isinstance(stored_as, BlockFormat) or stored_as.kind.name != "MXFP4":
        return False
    return not (part.columns.start % BLOCK or part.num_columns % BLOCK)


def _bias(matrix: str) -> str:
    return f"{matrix}_bias"


def _linear(x: torch.Tensor, matrix: Any, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = matrix.linear(x, bias)
    return out


def _supported(formats: Mapping[str, WeightFormat], in_turn: bool) -> dict[str, WeightFormat]:
    """The formats, or those of stacks with the projections in turn. Others are a ValueError."""
    made: dict[str, WeightFormat] = {}
    for name, each in formats.items():
        if isinstance(each, WhileLoading) or not isinstance(each, Dense | BlockFormat):
            raise ValueError(
                f"experts with biases are supported in MXFP4 and as plain weights; {name} has"
                f" {each.scheme.description if each.scheme else 'another format'}"
            )
        made[name] = DenseInTurn() if in_turn and isinstance(each, Dense) else each
    return made
