"""HeldWeights: a rank's weights by the checkpoint's names, when kernels have their own layouts.

A weight that kernels read as it is stored is replaced in place. For others a layer is filled anew,
and bound; then its matrix replaces the old one. On a GPU all values keep their addresses, so that
decode graphs stay valid.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from nanovllm.engine.shard import Shard
from nanovllm.engine.weights.places import Place, Shape, places_of
from nanovllm.engine.weights.tensors import BOUND, replace_values
from nanovllm.layers.layer import Layer, Loaded
from nanovllm.layers.ranks import Ranks
from nanovllm.layers.weights.stored import StoredTensor
from nanovllm.layers.weights.tensors import SOURCE
from nanovllm.models.bare import full_name
from nanovllm.models.decoder import CausalLM
from nanovllm.models.formats import hint_for, stored_name
from nanovllm.models.loader import TYPES, Target, checkpoint_targets

EMBEDDING = "model.embed_tokens.weight"
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # converted to each other
MOST_STAGED = 2  # layers that are filled at the same time, unless parts of them cannot be restored


class Spec(NamedTuple):
    """What is known of a tensor before its values are."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Stage:
    """A layer that is being filled, beside the one that it will replace."""

    def __init__(self, layer: Layer, parts: Iterable[str]) -> None:
        self.layer = layer
        self.missing = set(parts)


class HeldWeights:
    """The weights of one rank. `blank` is its model before loading, without memory."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.blank = blank_model(shard)
        self.targets = checkpoint_targets(self.blank)
        self.in_place = shard.device.type == "cuda"  # graphs have addresses of all weights
        self._usual: dict[str, str] = {}  # names that callers have used
        self._needs: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {}
        self._places: dict[str, list[Place]] = {}
        self._staged: dict[str, Stage] = {}
        self._head_is_old = False  # whether its copy of the embedding is
        self._parts: dict[str, set[str]] = defaultdict(set)
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []  # and their bytes
        self._find()

    @property
    def parts(self) -> set[str]:
        """The names of all tensors that can change, of a checkpoint that has nothing fused."""
        return {
            part for target in self.targets.values() if can_change(target) for part in target.parts
        }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of these."""
        return {name: self._whole_shape(self.targets[name]) for name in sorted(self.parts)}

    def _whole_shape(self, target: Target) -> tuple[int, ...]:
        param = self.blank.get_parameter(target.param)
        return self._layer(target).whole_shape(param, target.shard_id)

    def usual_name(self, name: str) -> str:
        """The name by which a tensor is known here; a ValueError if the model has no such one."""
        if name not in self._usual:
            usual = full_name(stored_name(name), self.targets)
            if usual not in self.targets:
                raise ValueError(f"the model has no tensor {name!r}{hint_for(name)}")
            self._usual[name] = usual
        return self._usual[name]

    def check(self, spec: Spec) -> None:
        """Raise a ValueError if the tensor cannot be loaded."""
        if spec.name not in self._needs:
            self._needs[spec.name] = self._need(spec.name)
        shape, allowed = self._needs[spec.name]
        if spec.shape != shape and not (shape == () and spec.shape == (1,)):
            raise ValueError(
                f"tensor {spec.name!r} has shape {spec.shape}, the model needs {shape}"
            )
        if spec.dtype not in allowed:
            types = ", ".join(str(each).removeprefix("torch.") for each in allowed)
            got = str(spec.dtype).removeprefix("torch.")
            raise ValueError(f"tensor {spec.name!r} has type {got}, a model needs one of {types}")

    def _need(self, name: str) -> tuple[tuple[int, ...], tuple[torch.dtype, ...]]:
        """The shape and the types that a tensor of this name may have."""
        target = self.targets[self.usual_name(name)]
        if not can_change(target):
            raise ValueError(f"tensor {name!r} is part of compiled steps and cannot change")
        dtype = self.blank.get_parameter(target.param).dtype
        return self._whole_shape(target), (dtype,) if dtype in TYPES else FLOATS

    def check_once(self, names: Iterable[str]) -> None:
        """Raise a ValueError if a tensor is given twice, be it by two names."""
        seen: dict[str, str] = {}
        for name in names:
            usual = self.usual_name(name)
            if usual in seen:
                also = "" if seen[usual] == name else f", also as {seen[usual]!r}"
                raise ValueError(f"tensor {name!r} is given twice{also}")
            seen[usual] = name

    def check_together(self, names: Iterable[str]) -> None:
        """Raise a ValueError if `names` have only some parts of a layer that need all of them."""
        given = self.parts_of(names)
        for layer, parts in self._parts.items():
            missing = parts - given
            if missing and missing != parts and not self._can_unpack(layer):
                raise ValueError(
                    f"{layer} has a layout of its kernels, and its tensors can be updated only"
                    f" together: add {', '.join(sorted(missing)[:4])}, or bring all of them in one"
                    " update by load_weights"
                )

    def check_tied(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise a ValueError if tied tensors are given with different values."""
        by_name = {self.usual_name(name): tensor for name, tensor in tensors.items()}
        for alias, name in self.blank.tied_weights.items():
            one, other = by_name.get(alias), by_name.get(name)
            if one is not None and other is not None and not same_values(one, other):
                raise ValueError(
                    f"{alias} and {name} differ, but tie_word_embeddings in config.json is true"
                )

    def parts_of(self, names: Iterable[str]) -> set[str]:
        """The parts that tensors of these names fill."""
        return {part for name in names for part in self.targets[self.usual_name(name)].parts}

    def load(self, name: str, tensor: Loaded) -> None:
        """Replace a weight, or a part of it. The tensor has been checked."""
        name = self.usual_name(name)
        target = self.targets[name]
        if (places := self._places.get(name)) is None:
            if not self.is_kept(target):
                self._stage(target, tensor)
                return
            places = self._places[name] = self._places_of(name)
        for place in places:
            place.fill(tensor)
        self._head_is_old |= target.param == EMBEDDING

    def finish(self) -> None:
        """Replace what is staged, and the head's copy of the embedding."""
        for layer in [*self._staged]:
            self._replace(layer)
        self._refresh_head()

    def drop_staged(self) -> None:
        """Drop what an update that failed has staged."""
        self._staged.clear()

    def drop(self) -> None:
        """Free all weights, on a CPU."""
        for layer in self.shard.model.modules():
            for name in BOUND:
                if isinstance(layer, Layer) and getattr(layer, name, None) is not None:
                    setattr(layer, name, None)
        for param in self.shard.model.parameters():
            storage = param.untyped_storage()
            self._dropped.append((storage, storage.nbytes()))
            storage.resize_(0)
        self._find()
        self._head_is_old = True

    def regain(self) -> None:
        """Have memory again for what was dropped, without values."""
        for storage, size in self._dropped:
            storage.resize_(size)
        self._dropped.clear()

    def _find(self) -> None:
        """Find where the weights are."""
        self._places.clear()
        self._parts.clear()  # of each layer that is not kept
        for target in self.targets.values():
            if not self.is_kept(target):
                self._parts[layer_name(target)].update(target.parts)

    def read(self, name: str) -> tuple[tuple[int, ...], list[tuple[Any, torch.Tensor]]]:
        """The shape of a checkpoint's tensor, and what this rank has of it: indices and values."""
        name = self.usual_name(name)
        target = self.targets[name]
        places = self._places_of(name)
        return self._whole_shape(target), [
            (place.index, place.memory.detach().cpu().clone()) for place in places
        ]

    def is_kept(self, target: Target) -> bool:
        """Whether this rank's memory of a tensor is as it is stored."""
        return self._memory(target) is not None

    def _memory(self, target: Target) -> torch.Tensor | None:
        live = self.shard.model.get_submodule(layer_name(target))
        assert isinstance(live, Layer)
        return live.kept(target.param.rpartition(".")[2])

    def _places_of(self, name: str) -> list[Place]:
        """Where this rank has the parts of a tensor, or of a copy that is restored."""
        target = self.targets[name]
        param, memory = self.blank.get_parameter(target.param), self._memory(target)
        if memory is None:
            live = self.shard.model.get_submodule(layer_name(target))
            assert isinstance(live, Layer)
            memory = live.unpacked(target.param.rpartition(".")[2])
        if memory is None:
            if param.numel() == 0 and not param.is_meta:
                return []
            raise ValueError(
                f"tensor {name!r} is quantized, or in a layout of the kernels that is not reversed"
            )
        return self._trace(target, memory)

    def _trace(self, target: Target, memory: torch.Tensor) -> list[Place]:
        layer, param = self._layer(target), self.blank.get_parameter(target.param)
        alias = param.like(memory) if isinstance(param, StoredTensor) else memory
        shape = layer.whole_shape(param, target.shard_id)

        def load(values: Shape) -> None:
            layer.weight_loader(alias, values, target.shard_id)  # type: ignore[arg-type]

        return places_of(load, shape)

    def _layer(self, target: Target) -> Layer:
        layer = self.blank.get_submodule(layer_name(target))
        assert isinstance(layer, Layer)
        return layer

    def _can_unpack(self, layer: str) -> bool:
        live, blank = (m.get_submodule(layer) for m in (self.shard.model, self.blank))
        assert isinstance(live, Layer)
        return all(
            live.kept(name) is not None or live.unpacked(name) is not None
            for name, param in blank._parameters.items()
            if param is not None
        )

    def _stage(self, target: Target, tensor: Loaded) -> None:
        layer = layer_name(target)
        if layer not in self._staged:
            for other in [*self._staged][: 1 - MOST_STAGED]:
                if self._can_unpack(other):
                    self._replace(other)
            empty = with_memory(self._layer(target), self.shard.device)
            self._staged[layer] = Stage(empty, self._parts[layer])
        stage = self._staged[layer]
        param = stage.layer.get_parameter(target.param.rpartition(".")[2])
        stage.layer.weight_loader(param, tensor, target.shard_id)
        stage.missing -= set(target.parts)
        if not stage.missing:
            self._replace(layer)

    def _replace(self, layer: str) -> None:
        """Bind a staged layer, with old values of what was not given, and take its matrix."""
        stage = self._staged.pop(layer)
        self._keep_old(layer, stage)
        stage.layer.bind(self.shard.backend)
        live = self.shard.model.get_submodule(layer)
        for name in BOUND:
            new = getattr(stage.layer, name, None)
            if new is None:
                continue
            if self.in_place and getattr(live, name, None) is not None:
                replace_values(getattr(live, name), new, layer)
            else:
                setattr(live, name, new)

    def _keep_old(self, layer: str, stage: Stage) -> None:
        """Copy the parts that were not given from the layer that is replaced."""
        live = self.shard.model.get_submodule(layer)
        assert isinstance(live, Layer)
        old: dict[str, torch.Tensor | None] = {}
        for part in sorted(stage.missing):
            target = self.targets[part]
            leaf = target.param.rpartition(".")[2]
            if leaf not in old:
                old[leaf] = live.unpacked(leaf)
            memory = old[leaf]
            if memory is None:
                raise ValueError(f"{layer} lacks {part}, which can be updated only with the others")
            new = self._trace(target, stage.layer.get_parameter(leaf))
            for place, source in zip(new, self._trace(target, memory), strict=True):
                place.memory.copy_(source.memory)

    def _refresh_head(self) -> None:
        """Make a head that has a copy of the embedding's table anew."""
        live, table = self.shard.model.lm_head, self.shard.model.model.embed_tokens.weight
        if not self._head_is_old or not live.is_tied:
            return
        self._head_is_old = False
        kept = live.kept("weight")
        if kept is not None and kept.data_ptr() == table.data_ptr():
            return
        head = copy.copy(self.blank.lm_head)
        head._parameters = dict(head._parameters) | {"weight": table}
        head._buffers = dict(head._buffers)
        self._staged["lm_head"] = Stage(head, ())
        self._replace("lm_head")


def can_change(target: Target) -> bool:
    """Whether a tensor can change: a scale of the KV cache is a constant of compiled steps."""
    return not layer_name(target).endswith(".attn")


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal; those in the same memory are not compared."""
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    return torch.equal(one, other.to(one.device, one.dtype))


def layer_name(target: Target) -> str:
    """The module that has the parameter."""
    return target.param.rpartition(".")[0]


def blank_model(shard: Shard, ranks: Ranks | None = None) -> CausalLM:
    """The model as it is before loading, without memory; of other `ranks` than the shard's."""
    live, before = shard.model, torch.get_default_dtype()
    torch.set_default_dtype(shard.placement.dtype)
    try:
        with torch.device("meta"), torch.inference_mode(False):
            return CausalLM(
                shard.model_config, shard.placement.max_positions, ranks or shard.ranks,
                live.whole_experts, live.formats,
            )  # fmt: skip
    finally:
        torch.set_default_dtype(before)


def with_memory(layer: Layer, device: torch.device) -> Layer:
    """A copy of a blank layer whose parameters and buffers have memory, not filled."""
    filled = copy.copy(layer)

    def memory(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device)

    filled._parameters = {
        name: param
        if param is None or (isinstance(param, StoredTensor) and param.stored is SOURCE)
        else param.like(memory(param))
        if isinstance(param, StoredTensor)
        else torch.nn.Parameter(memory(param), requires_grad=False)
        for name, param in layer._parameters.items()
    }
    filled._buffers = {
        name: None if buffer is None else memory(buffer) for name, buffer in layer._buffers.items()
    }
    return filled


def held_weights(shard: Shard) -> HeldWeights:
    """The weights of a shard; the first call takes a moment for large models."""
    if not isinstance(shard.held_weights, HeldWeights):
        shard.held_weights = HeldWeights(shard)
    return shard.held_weights
