"""LiveWeights: a rank's weights by the checkpoint's names, when kernels have their own layouts.

A weight that kernels read in the checkpoint's layout is replaced in place. For other weights, a new
copy of the layer is filled and bound; then its matrix replaces the old one. On a GPU all values
keep their addresses, so that decode graphs stay valid.
"""

import copy
import functools
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import torch

from nanovllm.engine.run.shard import Shard
from nanovllm.formats.stored import Loaded, StoredTensor
from nanovllm.layers.layer import Layer
from nanovllm.models.loader import Target
from nanovllm.weights.blank import blank_model, carried_heads, with_heads, with_memory
from nanovllm.weights.bound_layers import alias_of, kept, unpacked
from nanovllm.weights.copies import Copies
from nanovllm.weights.named_tensors import KnownTensors, layer_name, of_blocks
from nanovllm.weights.places import Place, Shape, places_of
from nanovllm.weights.tensors import BOUND, refresh, replace_values

EMBEDDING = "model.embed_tokens.weight"
MOST_STAGED = 2  # copies of layers at the same time, unless parts of layers cannot be restored


class Stage:
    """A copy of a layer that receives new weights while the old layer still serves."""

    def __init__(self, layer: Layer, parts: Iterable[str]) -> None:
        self.layer = layer
        self.missing = set(parts)
        self.waits = False  # whether it waits for another update, which may give parts again


class LiveWeights:
    """The weights of one rank. `blank` is its model before loading, without memory.

    Both models have the heads for drafts that the checkpoint carries.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.model = with_heads(shard.model, carried_heads(shard))
        self.blank = blank_model(shard)
        self.known = KnownTensors(self.blank)
        self.in_place = shard.device.type == "cuda"  # graphs have addresses of all weights
        self._places: dict[str, list[Place]] = {}
        self._staged: dict[str, Stage] = {}
        self._head_is_old = False  # whether the copy of the embedding is outdated
        self._parts: dict[str, set[str]] = defaultdict(set)
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []  # storages and their bytes
        self._find()

    def check_together(self, names: Iterable[str], missing: Collection[str]) -> None:
        """Raise a ValueError if `names` have only some parts of a layer that need all of them.

        A layer may wait for parts that are `missing`.
        """
        given = self.known.parts_of(names) if self._parts else set()
        for layer, parts in self._parts.items():
            waits_for = self._staged[layer].missing if layer in self._staged else parts
            lacking = waits_for - given
            if lacking in (set(), parts) or not lacking.isdisjoint(missing):
                continue
            if not self._can_unpack(layer):
                raise ValueError(
                    f"{layer} has a layout of its kernels, and its tensors can be updated only"
                    f" together: add {', '.join(sorted(lacking)[:4])}, or bring all of them in one"
                    " update by load_weights"
                )

    def load(self, tensors: Iterable[tuple[str, Loaded]]) -> None:
        """Replace weights, or parts of them. The tensors have been checked."""
        copies = Copies()
        for given, tensor in tensors:
            known = self.known[given]
            if (places := self._places.get(known.name)) is None:
                if not self.is_kept(known.target):
                    self._stage(known.target, tensor)
                    continue
                places = self._places[known.name] = self._places_of(known.name)
            copies.add(known.target.parts, places, tensor)
            self._head_is_old |= known.target.param == EMBEDDING
        copies.make()

    def are_held(self, tensors: Iterable[tuple[str, Loaded]]) -> bool:
        """Whether this rank has these values, in its type. Reads all tensors: ranks share them."""
        equal = [
            torch.equal(place.memory, place.part(tensor).to(place.memory))
            for name, tensor in tensors
            for place in self._places_of(self.known[name].name)
        ]
        return all(equal)

    def finish(self, missing: Collection[str] = ()) -> None:
        """Replace the staged layers, and the head's copy of the embedding.

        If a layer lacks parts that are `missing`, it stays staged until another update has them.
        """
        for layer, stage in [*self._staged.items()]:
            if stage.missing.isdisjoint(missing) or self._can_unpack(layer):
                self._replace(layer)
            else:
                stage.waits = True
        self._refresh_head()
        refresh(self.model)

    def drop_staged(self) -> None:
        """Drop the staged layers: an update has failed, or all weights are dropped."""
        self._staged.clear()

    def drop(self) -> None:
        """Free all weights, on a CPU; not those of heads, as updates need not bring them."""
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
        """Allocate the dropped weights again, without values."""
        for storage, size in self._dropped:
            storage.resize_(size)
        self._dropped.clear()

    def _find(self) -> None:
        """Find where the weights are."""
        self._places.clear()
        self._parts.clear()  # of each layer that is not stored in the checkpoint's layout
        for target in self.known.targets.values():
            if not self.is_kept(target):
                self._parts[layer_name(target)].update(target.parts)

    def read(self, name: str) -> tuple[tuple[int, ...], list[tuple[Any, torch.Tensor]]]:
        """The shape of a checkpoint's tensor, and this rank's parts of it: indices and values."""
        known = self.known[name]
        places = self._places_of(known.name)
        return known.shape, [(place.index, place.memory.detach().cpu().clone()) for place in places]

    def is_kept(self, target: Target) -> bool:
        """Whether this rank stores a tensor in the checkpoint's layout."""
        return self._memory(target) is not None

    def _memory(self, target: Target) -> torch.Tensor | None:
        live = self.model.get_submodule(layer_name(target))
        assert isinstance(live, Layer)
        return kept(live, target.param.rpartition(".")[2])

    def _places_of(self, name: str) -> list[Place]:
        """Where this rank has the parts of a tensor, or of a copy that is restored."""
        target = self.known.targets[name]
        param, memory = self.blank.get_parameter(target.param), self._memory(target)
        if memory is None:
            live = self.model.get_submodule(layer_name(target))
            assert isinstance(live, Layer)
            memory = unpacked(live, target.param.rpartition(".")[2])
        if memory is None:
            if param.numel() == 0 and not param.is_meta:
                return []
            raise ValueError(
                f"tensor {name!r} is quantized, or in a layout of the kernels that is not reversed"
                + of_blocks(param.dtype)
            )
        return self._trace(target, memory)

    def _trace(self, target: Target, memory: torch.Tensor) -> list[Place]:
        layer, param = self._layer(target), self.blank.get_parameter(target.param)
        alias = alias_of(param, memory) if isinstance(param, StoredTensor) else memory
        shape = layer.whole_shape(param, target.shard_id)

        def load(values: Shape) -> None:
            layer.weight_loader(alias, values, target.shard_id)  # type: ignore[arg-type]

        return places_of(load, shape)

    def _layer(self, target: Target) -> Layer:
        layer = self.blank.get_submodule(layer_name(target))
        assert isinstance(layer, Layer)
        return layer

    def _can_unpack(self, layer: str) -> bool:
        live, blank = (m.get_submodule(layer) for m in (self.model, self.blank))
        assert isinstance(live, Layer)
        return all(
            kept(live, name) is not None or unpacked(live, name) is not None
            for name, param in blank._parameters.items()
            if param is not None
        )

    def _stage(self, target: Target, tensor: Loaded) -> None:
        layer = layer_name(target)
        if layer not in self._staged:
            for other in [*self._staged][: max(0, len(self._staged) - MOST_STAGED + 1)]:
                if self._can_unpack(other):
                    self._replace(other)
            empty = with_memory(self._layer(target), self.shard.device)
            self._staged[layer] = Stage(empty, self._parts[layer])
        stage = self._staged[layer]
        param = stage.layer.get_parameter(target.param.rpartition(".")[2])
        stage.layer.weight_loader(param, tensor, target.shard_id)
        stage.missing -= set(target.parts)
        if not stage.missing and not stage.waits:
            self._replace(layer)

    def _replace(self, layer: str) -> None:
        """Bind a staged layer, with old values for missing parts, and take its matrix."""
        stage = self._staged.pop(layer)
        self._keep_old(layer, stage)
        stage.layer.bind(self.shard.backend)
        live = self.model.get_submodule(layer)
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
        live = self.model.get_submodule(layer)
        assert isinstance(live, Layer)
        old: dict[str, torch.Tensor | None] = {}
        for part in sorted(stage.missing):
            target = self.known.targets[part]
            leaf = target.param.rpartition(".")[2]
            if leaf not in old:
                old[leaf] = unpacked(live, leaf)
            memory = old[leaf]
            if memory is None:
                raise ValueError(f"{layer} lacks {part}, which can be updated only with the others")
            new = self._trace(target, stage.layer.get_parameter(leaf))
            for place, source in zip(new, self._trace(target, memory), strict=True):
                place.memory.copy_(source.memory)

    def _refresh_head(self) -> None:
        """Renew the head if it has a copy of the embedding's table."""
        live, table = self.shard.model.lm_head, self.shard.model.model.embed_tokens.weight
        if not self._head_is_old or not live.is_tied:
            return
        self._head_is_old = False
        memory = kept(live, "weight")
        if memory is not None and memory.data_ptr() == table.data_ptr():
            return
        head = copy.copy(self.blank.lm_head)
        head._parameters = dict(head._parameters) | {"weight": table}
        head._buffers = dict(head._buffers)
        self._staged["lm_head"] = Stage(head, ())
        self._replace("lm_head")


_of_shards: dict[Shard, LiveWeights] = {}  # by open shards, once they were needed


def live_weights(shard: Shard) -> LiveWeights:
    """The weights of a shard; the first call takes a moment for large models."""
    if shard not in _of_shards:
        _of_shards[shard] = LiveWeights(shard)
        shard.at_close.append(functools.partial(_of_shards.pop, shard))
    return _of_shards[shard]
