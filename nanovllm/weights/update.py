"""The commands by which all ranks replace or read weights."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import reduce_tensor

from nanovllm.engine.run.shard import Shard
from nanovllm.formats.names import checkpoint_name
from nanovllm.layers.layer import Layer
from nanovllm.layers.ranks import ALONE
from nanovllm.models.dummy import dummy_values
from nanovllm.models.loader import is_left_out, read_weights
from nanovllm.utils.checks import shorten
from nanovllm.utils.resources import trim_heap
from nanovllm.weights.blank import blank_model
from nanovllm.weights.live import live_weights
from nanovllm.weights.shown_weights import shown_weights
from nanovllm.weights.tensors import refresh

BATCH_BYTES = 256 << 20
Handle = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]


class Spec(NamedTuple):
    """A tensor's name, shape and type, which are known before its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Given(NamedTuple):
    """A named tensor from the caller, and the handle by which each process opens it."""

    name: str
    tensor: torch.Tensor
    handle: Handle | None

    @property
    def spec(self) -> Spec:
        """The description for other ranks."""
        return Spec(self.name, tuple(self.tensor.shape), self.tensor.dtype)


def given(item: Any) -> Given:
    """Check an item of the caller's iterable; a handle is opened."""
    if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], str):
        raise TypeError(f"weights must be pairs of a name and a tensor, got {shorten(item)}")
    name, value = item
    handle = None
    if isinstance(value, tuple) and len(value) == 2 and callable(value[0]):
        handle = value[0], tuple(value[1])
        value = value[0](*value[1])
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta or value.is_nested:
            raise ValueError(
                f"weights must be dense tensors that have values; {name!r} has {kind_of(value)}"
            )
        return Given(name, value.detach() if value.requires_grad else value, handle)
    raise TypeError(
        f"weights must have tensors, or handles of torch.multiprocessing.reductions.reduce_tensor;"
        f" {name!r} has {shorten(value)}"
    )


def kind_of(tensor: torch.Tensor) -> str:
    """The kind of a tensor that is not dense."""
    if tensor.is_meta:
        return "one on the meta device"
    return "a nested one" if tensor.is_nested else f"one of layout {tensor.layout}"


def pairs(weights: Any) -> Iterable[Any]:
    """The items of a dict, or of another iterable."""
    if isinstance(weights, Mapping):
        return list(weights.items())
    if not isinstance(weights, Iterable) or isinstance(weights, str | bytes | torch.Tensor):
        raise TypeError(
            f"weights must be a dict, or an iterable of (name, tensor), got {shorten(weights)}"
        )
    return weights


def sendable_weight(item: Any) -> Any:
    """A named tensor for another process: a handle of a CUDA tensor, a copy of another."""
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[1], torch.Tensor):
        name, tensor = item[0], item[1].detach()
        if tensor.is_cuda:
            return name, reduce_tensor(tensor)  # type: ignore[no-untyped-call]
        return name, tensor.clone()
    return item


class LoadWeights:
    """Replaces weights. Rank 0 has the tensors; the others open handles, or are sent the tensors.

    Peak memory: on other ranks, one whole tensor, and small ones that wait to be copied.
    """

    def __init__(
        self, weights: Sequence[Given] = (), sent: Sequence[tuple[Spec, Handle | None]] = ()
    ) -> None:
        self.weights, self.sent = weights, sent

    def __reduce__(self) -> Any:
        return type(self), ((), [(one.spec, one.handle) for one in self.weights])

    def run(self, shard: Shard) -> Any:
        """Load this rank's parts."""
        live_weights(shard).load(self._tensors(shard))

    def _tensors(self, shard: Shard) -> Iterator[tuple[str, torch.Tensor]]:
        alone = shard.ranks.size == 1
        for name, tensor, handle in self.weights:
            if alone or handle is not None:
                yield name, tensor
            else:
                yield name, _broadcast(shard, tensor.shape, tensor.dtype, tensor)
        for (name, shape, dtype), handle in self.sent:
            if handle is not None:
                function, arguments = handle
                yield name, function(*arguments)
            else:
                yield name, _broadcast(shard, shape, dtype)


class AreHeld(LoadWeights):
    """Finds whether all ranks hold the values of tensors."""

    def run(self, shard: Shard) -> Any:
        return live_weights(shard).are_held(self._tensors(shard))


def _broadcast(
    shard: Shard, shape: tuple[int, ...], dtype: torch.dtype, own: torch.Tensor | None = None
) -> torch.Tensor:
    """Send a tensor from rank 0 to all ranks."""
    size = math.prod(shape) * dtype.itemsize
    data = torch.empty(size, dtype=torch.uint8, device=shard.device)
    whole = data.view(dtype).view(shape)
    if own is not None:
        whole.copy_(own)
    if size:
        shard.ranks.broadcast(data)
    return whole


class Finish(NamedTuple):
    """Ends an update: staged layers replace the old ones, or are dropped.

    A layer that lacks parts that are `missing` in the engine waits for another update.
    """

    succeeds: bool
    missing: frozenset[str] = frozenset()

    def run(self, shard: Shard) -> None:
        weights = live_weights(shard)
        if self.succeeds:
            weights.finish(self.missing)
        else:
            weights.drop_staged()
        if shard.device.type == "cpu":  # it takes long, and on a GPU there is little to return
            trim_heap()


class Read(NamedTuple):
    """Reads a rank's part of a tensor."""

    name: str

    def run(self, shard: Shard) -> tuple[tuple[int, ...], list[tuple[Any, torch.Tensor]]]:
        return live_weights(shard).read(self.name)


class Apply(NamedTuple):
    """Calls a function with the model of each rank."""

    function: Callable[[torch.nn.Module], Any]

    def run(self, shard: Shard) -> Any:
        try:
            with shown_weights(shard.model):
                return self.function(shard.model)
        except SystemExit as error:  # it would end other ranks
            raise RuntimeError(f"the function raised SystemExit: {error}") from error
        finally:  # also after an error, before which the function may have changed weights
            refresh(shard.model)


def assembled(
    parts: Sequence[tuple[tuple[int, ...], list[tuple[Any, torch.Tensor]]]],
) -> torch.Tensor:
    """Assemble a whole tensor from the ranks' parts."""
    shape = parts[0][0]
    pieces = [piece for _, held in parts for piece in held]
    whole = torch.empty(shape, dtype=pieces[0][1].dtype)
    for index, values in pieces:
        whole[index] = values
    return whole


def batches(weights: Iterable[Any]) -> Iterator[list[Given]]:
    """The tensors of each command: a whole list, or about BATCH_BYTES of another iterable."""
    if isinstance(weights, list | tuple):
        yield [given(item) for item in weights]
        return
    batch: list[Given] = []
    size = 0
    for item in weights:
        batch.append(given(item))
        size += batch[-1].tensor.nbytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class Reload(NamedTuple):
    """Loads the weights of the checkpoint again, or the random ones if there is none."""

    path: Path
    is_dummy: bool
    seed: int

    def run(self, shard: Shard) -> None:
        weights = live_weights(shard)
        if self.is_dummy:
            weights.load(dummy_weights(shard, self.seed))
        else:
            for tensors in read_weights(self.path):
                weights.load(
                    (name, tensor)
                    for name, tensor in tensors.items()
                    if not weights.blank.names.is_skipped(name)
                    and not is_left_out(name, tensor, weights.known.targets)
                    and weights.known[name].can_change
                )
        weights.finish()
        trim_heap()


def dummy_weights(shard: Shard, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The random weights of `load_dummy`, and initial values of the other parameters."""
    whole = blank_model(shard, ALONE)
    for name, param, values in dummy_values(whole, seed, shard.device):
        if values is None:
            layer = whole.get_submodule(name.rpartition(".")[0])
            assert isinstance(layer, Layer)
            initial = 0.0 if name.endswith(".bias") else layer.initial
            values = torch.full_like(param, initial, device=shard.device)
        yield checkpoint_name(name), values
