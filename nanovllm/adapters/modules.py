"""The modules of a model that can have adapters, by the names that checkpoints give them.

These are embed_tokens and lm_head, all linear layers of attention and feed-forward, and the
matrices of experts: of each expert, or of all experts of a layer together; and their routers.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from nanovllm.formats.names import Names
from nanovllm.formats.stored import RankPart
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.experts import Experts
from nanovllm.layers.file_order import RowsInTurn
from nanovllm.layers.linear import LinearBase
from nanovllm.models.decoder import Model


@dataclass(frozen=True)
class Module:
    """A module of a checkpoint: `projections` of a layer's matrix, or of its experts'."""

    name: str
    layer: nn.Module
    held: RankPart
    projections: tuple[int, ...]
    matrix: str = ""  # of experts
    expert: int | None = None  # None: all of them, if the layer has experts

    @property
    def is_stack(self) -> bool:
        """Whether it stands for the matrices of all experts of its layer."""
        return isinstance(self.layer, Experts) and self.expert is None

    @property
    def num_experts(self) -> int:
        """The number of experts of its layer if it is a stack; else 1."""
        return self.layer.num_experts if self.is_stack else 1  # type: ignore[return-value]

    @property
    def is_embedding(self) -> bool:
        """Whether its input is token ids."""
        return isinstance(self.layer, VocabParallelEmbedding)

    @property
    def size_in(self) -> int:
        """Inputs of the whole module, on all ranks together."""
        return self.held.in_features

    @property
    def size_out(self) -> int:
        """Outputs of the whole module."""
        return sum(self.held.sizes[i] for i in self.projections)


def modules_of(model: Model) -> dict[str, Module]:
    """The modules by name.

    A fused layer has several names: one for each of its projections, and one for all together.
    """
    return {module.name: module for module in _modules(model)}


def _modules(model: Model) -> Iterator[Module]:
    for name, layer in model.named_modules():
        if isinstance(layer, Experts):
            yield from _of_experts(name, layer)
        elif isinstance(layer, VocabParallelEmbedding):
            yield Module(name, layer, layer.rank_part, (0,))
        elif isinstance(layer, LinearBase):
            yield from _of_linear(name, layer, model.names)


def _of_linear(name: str, layer: LinearBase, names: Names) -> Iterator[Module]:
    above, dot, leaf = name.rpartition(".")
    yield Module(name, layer, layer.rank_part, tuple(range(len(layer.rank_part.sizes))))
    for index, part in enumerate(names.parts(leaf)):
        yield Module(f"{above}{dot}{part}", layer, layer.rank_part, (index,))


def _of_experts(name: str, layer: Experts) -> Iterator[Module]:
    """The stacks of a layer; and each expert's matrices, unless files only have stacks."""
    for matrix, kinds in layer.projections.items():
        held = layer.rank_parts[matrix]
        yield Module(f"{name}.{matrix}", layer, held, tuple(range(len(kinds))), matrix)
        for expert in range(0 if isinstance(layer, RowsInTurn) else layer.num_experts):
            for index, kind in enumerate(kinds):
                yield Module(f"{name}.{expert}.{kind}", layer, held, (index,), matrix, expert)
