"""KnownTensors: the tensors that a checkpoint of the model has; checks given tensors.

Names are resolved once, because a trainer sends the same names again. It knows no values of the
engine's weights.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from nanovllm.formats.names import usual_name
from nanovllm.layers.layer import Layer
from nanovllm.models.carried_head import ModelWithHead
from nanovllm.models.decoder import CausalLM
from nanovllm.models.file_errors import unexpected_tensor
from nanovllm.models.loader import TYPES, Target, checkpoint_targets

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # converted to each other


class Known(NamedTuple):
    """A tensor of checkpoints: its usual `name`, and the `types` that it may have."""

    name: str
    target: Target
    shape: tuple[int, ...]
    types: tuple[torch.dtype, ...]
    can_change: bool


class KnownTensors:
    """The tensors of checkpoints, fused or not. `blank` is the model before loading."""

    def __init__(self, blank: CausalLM) -> None:
        self.blank = blank
        self.targets = checkpoint_targets(blank)
        tied = blank.tied_weights
        self.other_names = {**tied, **{name: alias for alias, name in tied.items()}}
        self._known: dict[str, Known] = {}  # by the names that callers have used

    @property
    def parts(self) -> set[str]:
        """The names of all tensors that can change, in a checkpoint without fused tensors.

        A head for drafts is not needed, so that its tensors are never missing.
        """
        head = self.blank.prefix if isinstance(self.blank, ModelWithHead) else None
        needed = (each for each in self.targets.values() if can_change(each))
        parts = {part for target in needed for part in target.parts}
        return {part for part in parts if head is None or not part.startswith(head)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of these."""
        return {name: self[name].shape for name in sorted(self.parts)}

    def __getitem__(self, name: str) -> Known:
        """The tensor of this usual or other name; a ValueError if there is none."""
        if (known := self._known.get(name)) is None:
            known = self._known[name] = self._find(name)
        return known

    def _find(self, name: str) -> Known:
        usual = usual_name(name, self.blank.names, self.targets)
        if usual not in self.targets:
            raise unexpected_tensor(name, "the model has no tensor")
        target = self.targets[usual]
        param = self.blank.get_parameter(target.param)
        layer = self.blank.get_submodule(layer_name(target))
        assert isinstance(layer, Layer)
        is_coded = param.dtype in (*TYPES, torch.uint8)
        types = (param.dtype,) if is_coded else FLOATS
        shape = layer.whole_shape(param, target.shard_id)
        return Known(usual, target, shape, types, can_change(target))

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raise a ValueError if the tensor cannot be loaded."""
        known, shape, dtype = self[name], tensor.shape, tensor.dtype
        if not known.can_change:
            raise ValueError(f"tensor {name!r} is part of compiled steps and cannot change")
        if shape != known.shape and not (known.shape == () and shape == (1,)):
            raise ValueError(
                f"tensor {name!r} has shape {tuple(shape)}, the model needs {known.shape}"
                + of_blocks(known.types[0])
            )
        if dtype not in known.types:
            types = ", ".join(str(each).removeprefix("torch.") for each in known.types)
            got = str(dtype).removeprefix("torch.")
            raise ValueError(
                f"tensor {name!r} has type {got}, a model needs one of {types}"
                + of_blocks(known.types[0])
            )

    def check_once(self, names: Iterable[str]) -> None:
        """Raise a ValueError if a tensor is given twice, also by two names."""
        seen: dict[str, str] = {}
        for name in names:
            usual = self[name].name
            if usual in seen:
                also = "" if seen[usual] == name else f", also as {seen[usual]!r}"
                raise ValueError(f"tensor {name!r} is given twice{also}")
            seen[usual] = name

    def check_tied(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise a ValueError if tied tensors are given with different values."""
        if not self.blank.tied_weights:
            return
        by_name = {self[name].name: tensor for name, tensor in tensors.items()}
        for alias, name in self.blank.tied_weights.items():
            one, other = by_name.get(alias), by_name.get(name)
            if one is not None and other is not None and not same_values(one, other):
                raise tied_error(alias, name)

    def parts_of(self, names: Iterable[str]) -> set[str]:
        """The parts that tensors of these names fill."""
        return {part for name in names for part in self[name].target.parts}


def of_blocks(dtype: torch.dtype) -> str:
    """What an error adds about a tensor of this type: the way out if it is stored in blocks."""
    if dtype != torch.uint8:
        return ""
    return '; it has blocks: quantization="dequantize" makes plain weights of a GGUF file\'s'


def tied_error(one: str, other: str) -> ValueError:
    """The error of tied tensors with different values."""
    return ValueError(f"{one} and {other} differ, but tie_word_embeddings in config.json is true")


def can_change(target: Target) -> bool:
    """Whether a tensor can change: a scale of the KV cache is a constant of compiled steps."""
    return not target.param.endswith((".attn.k_scale", ".attn.v_scale"))


def layer_name(target: Target) -> str:
    """The module that has the parameter."""
    return target.param.rpartition(".")[0]


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal; those in the same memory are not compared."""
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    return torch.equal(one, other.to(one.device, one.dtype))
