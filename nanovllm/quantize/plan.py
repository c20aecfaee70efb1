"""Plan: which tensors of a checkpoint are quantized, and which layer of the model reads each."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from nanovllm.formats.format import Dense
from nanovllm.formats.names import HEAD, Names, usual_name
from nanovllm.formats.stored import check_shape
from nanovllm.layers.biased_experts import BiasedExperts
from nanovllm.layers.experts import MATRICES, Experts
from nanovllm.layers.file_order import Ordered
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.sparse_mlp import ExpertRouter
from nanovllm.models.decoder import CausalLM
from nanovllm.models.file_errors import missing_tensors
from nanovllm.models.loader import (
    InFile,
    Target,
    check_type,
    checkpoint_targets,
    is_left_out,
    layer_of,
    mark_found,
    read_weights,
)
from nanovllm.models.not_finite import WRONG, are_all_finite
from nanovllm.models.tied import second_names

BLOCK = re.compile(r"model\.layers\.(\d+)\.")
ROUTER = re.compile(r"(gate|router)(\.|$)")  # small layers that choose: rounding may change much
LEAST = 32  # inputs, or outputs: smaller matrices save nothing
WEIGHT, NUMBER = ".weight", "NUMBER"  # the end of a name; in place of an expert's number


@dataclass(frozen=True)
class Source:
    """A tensor of a checkpoint, by its name there, and where the model has it, if anywhere.

    `module` is the layer's name. A tensor that `is_linear` is the weight of a linear layer, or is
    not used here and looks like one.
    """

    name: str
    tensor: InFile
    target: Target | None = None
    module: str = ""
    is_quantized: bool = False
    is_linear: bool = False

    @property
    def block(self) -> int | None:
        """The number of the block that has it."""
        match = BLOCK.match(self.target.param) if self.target else None
        return int(match[1]) if match else None

    def values(self) -> torch.Tensor:
        """All values. Those that the model uses must be finite."""
        tensor = self.tensor[...]
        if self.target is not None and not are_all_finite(tensor):
            raise ValueError(f"tensor {self.name!r} has {WRONG}")
        return tensor


def read_sources(model: CausalLM, path: Path) -> list[Source]:
    """All tensors of the checkpoint, which must have each of the model's once. Reads no weights.

    Types and shapes must be those that the loader takes.
    """
    targets, names = checkpoint_targets(model), model.names
    missing = {part: target.param for target in targets.values() for part in target.parts}
    found, used = [], set[str]()
    for tensors in read_weights(path):
        for name, tensor in tensors.items():
            usual = usual_name(name, names, targets)
            is_matrix = name.endswith(WEIGHT) and len(tensor.shape) == 2
            if names.is_skipped(name) or is_left_out(usual, tensor, targets):
                found.append(Source(name, tensor, is_linear=is_matrix))
                continue
            if not second_names(model.tied_weights, [usual], used):
                mark_found([usual], targets, missing)
            used.add(usual)
            target = targets[usual]
            module = target.param.rpartition(".")[0]
            layer, param = layer_of(model, module), model.get_parameter(target.param)
            _check(name, tensor, param.dtype, layer.whole_shape(param, target.shard_id))
            quantized = _is_quantized(module, layer, target, tensor)
            is_linear = is_matrix and isinstance(layer, LinearBase)
            found.append(Source(name, tensor, target, module, quantized, is_linear))
    if missing:
        raise missing_tensors(missing)
    return found


def _check(name: str, tensor: InFile, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise unless a tensor has this shape, and a type that the loader takes for `dtype`."""
    try:
        check_type(tensor.dtype, dtype)
        if shape or tensor.shape != (1,):  # some files store scalars like that
            check_shape(tensor, shape)
    except ValueError as error:
        raise ValueError(f"tensor {name!r} has {error}") from None


def _is_quantized(module: str, layer: nn.Module, target: Target, tensor: InFile) -> bool:
    """Whether a tensor has weights that are quantized: of a fused layer, all parts or none."""
    leaf = target.param.rpartition(".")[2]
    if not BLOCK.match(target.param) or ROUTER.search(module) or tensor.shape[-1] < LEAST:
        return False
    if isinstance(layer, BiasedExperts):
        return False  # they take plain weights and MXFP4, no other codes
    if isinstance(layer, Experts):
        return leaf in MATRICES and all(
            type(layer.formats[name]) is Dense and layer.rank_parts[name].in_features >= LEAST
            for name in MATRICES
        )
    if not isinstance(layer, LinearBase) or isinstance(layer, ExpertRouter | Ordered):
        return False
    return leaf == "weight" and layer.rank_part.num_rows >= LEAST


def plain_layers(sources: Iterable[Source], model: CausalLM) -> list[str]:
    """What is not quantized, as compressed-tensors' `ignore` has it: layers' names, and patterns.

    A pattern is for all experts of a layer. The head is there in any case: it may be tied.
    """
    found = dict.fromkeys([HEAD])
    for source in sources:
        if source.is_linear and not source.is_quantized:
            found |= dict.fromkeys([source.name.removesuffix(WEIGHT)])
        elif source.target is not None and not source.is_quantized:
            layer = model.get_submodule(source.module)
            is_matrix = source.target.param.rpartition(".")[2] in MATRICES
            if isinstance(layer, Experts) and is_matrix:
                found |= dict.fromkeys(_of_experts(source.module, layer, model.names))
    return [*found]


def _of_experts(module: str, layer: Experts, names: Names) -> Iterator[str]:
    """Patterns for the names in files of all experts' matrices."""
    for kind in (kind for kinds in layer.projections.values() for kind in kinds):
        name = re.escape(names.theirs(f"{module}.{NUMBER}.{kind}"))
        yield f"re:{name.replace(NUMBER, '[0-9]+')}$"


def matrices_of(source: Source, names: Names) -> Iterator[tuple[str, torch.Tensor]]:
    """The layers' names in files, and their matrices: one, or all of a stack of experts'.

    In a stack, each expert's projections are joined.
    """
    assert source.target is not None
    tensor, parts = source.tensor, source.target.parts
    if len(tensor.shape) == 2:
        yield source.name.removesuffix(WEIGHT), source.values()
        return
    per_expert = len(parts) // tensor.shape[0]
    for index, name in enumerate(parts):
        expert, projection = divmod(index, per_expert)
        rows = tensor.shape[1] // per_expert
        matrix = tensor[expert, projection * rows : (projection + 1) * rows]
        yield names.theirs(name.removesuffix(WEIGHT)), matrix
