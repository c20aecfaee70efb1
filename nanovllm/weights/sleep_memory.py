"""SleepMemory: memory for a GPU's weights, slots and KV pool, if the engine may sleep."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from nanovllm.engine.run.shard import Shard
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.weights.tensors import slots_of, weights_of
from nanovllm.weights.virtual_memory import VirtualMemory

ALIGNMENT = 512  # bytes, as PyTorch aligns tensors


class Region(Protocol):
    """A range of addresses that memory can be mapped to; `VirtualMemory` on a GPU."""

    @property
    def bytes(self) -> torch.Tensor: ...
    def map(self, num_bytes: int | None = None) -> None: ...
    def unmap(self) -> None: ...
    def save(self) -> None: ...
    def drop_saved(self) -> None: ...
    def restore(self) -> None: ...
    def close(self) -> None: ...


class SleepMemory:
    """The regions of a rank: its weights, weights of draft models, slots and KV pools."""

    def __init__(self, make: Callable[[int], Region]) -> None:
        self._make = make
        self._weights: list[Region] = []
        self._drafts: list[Region] = []
        self._slots: list[Region] = []
        self._pools: list[Region] = []

    @classmethod
    def on(cls, device: torch.device) -> "SleepMemory":
        """Regions on a GPU."""
        return cls(lambda num_bytes: VirtualMemory(num_bytes, device))

    def take_over(self, models: list[tuple[ModelConfig, CausalLM]]) -> None:
        """Move the weights of the model (the first) and of draft models, and adapters' slots."""
        own, *others = (weights_of(model) for _, model in models)
        self.move_weights(own, [tensor for each in others for tensor in each])
        self.move_slots(slots_of(models[0][1]))

    def move_weights(self, weights: Iterable[torch.Tensor], drafts: Iterable[torch.Tensor]) -> None:
        """Move tensors into regions. Peak memory: a chunk and the largest tensor more."""
        self._weights = self._moved([*weights])
        ours = {tensor.untyped_storage().data_ptr() for r in self._weights for tensor in [r.bytes]}
        others = [t for t in drafts if t.untyped_storage().data_ptr() not in ours]
        self._drafts = self._moved(others)

    def move_slots(self, slots: Iterable[torch.Tensor]) -> None:
        """Move the tensors of adapters' slots, which come back as zeros: the slots are empty."""
        self._slots = self._moved([*slots])

    def pool(self, num_bytes: int) -> torch.Tensor:
        """Zeroed memory for a KV pool. The memory of an earlier call must not be used any more."""
        region = self._make(num_bytes)
        region.map()
        self._pools.append(region)
        return region.bytes[:num_bytes].zero_()

    def save(self, keeps_weights: bool) -> None:
        """Copy the weights to the host, or only those of draft models. Nothing is freed yet.

        If the host has no memory for them, nothing stays saved.
        """
        self.drop_saved()
        try:
            for region in (*self._drafts, *(self._weights if keeps_weights else ())):
                region.save()
        except BaseException:
            self.drop_saved()
            raise

    def drop_saved(self) -> None:
        """Free the saved copies."""
        for region in (*self._weights, *self._drafts):
            region.drop_saved()

    def release(self) -> None:
        """Return all memory to the device. Values that were not saved are lost."""
        for region in (*self._weights, *self._drafts, *self._slots, *self._pools):
            region.unmap()

    def restore(self, memories: Sequence[str]) -> None:
        """Restore the memory of "weights" (with slots) or "kv_cache": saved values, or zeros."""
        if "weights" in memories:
            for region in (*self._weights, *self._drafts, *self._slots):
                region.restore()
        if "kv_cache" in memories:
            for region in self._pools:
                region.restore()

    def close(self) -> None:
        """Free everything; tensors in this memory must not be used any more."""
        for region in (*self._weights, *self._drafts, *self._slots, *self._pools):
            region.close()

    def _moved(self, tensors: list[torch.Tensor]) -> list[Region]:
        storages: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.untyped_storage().nbytes():
                storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        if not storages:
            return []
        sizes = [group[0].untyped_storage().nbytes() for group in storages.values()]
        region = self._make(sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
        memory, end = region.bytes, 0
        for group, size in zip(storages.values(), sizes, strict=True):
            start, end = end, end + -(-size // ALIGNMENT) * ALIGNMENT
            region.map(end)
            _move(group, memory, start)
        return [region]


def sleep_memory(device: torch.device) -> SleepMemory | None:
    """The memory of an engine that may sleep; None on a CPU, where tensors are freed one by one."""
    return SleepMemory.on(device) if device.type == "cuda" else None


def memory_of(shard: Shard) -> SleepMemory | None:
    """A shard's memory that can be freed, if it has some."""
    assert shard.memory is None or isinstance(shard.memory, SleepMemory)
    return shard.memory


def _move(tensors: list[torch.Tensor], memory: torch.Tensor, start: int) -> None:
    """Move a storage, with all tensors that share it, to a place in `memory`."""
    source = tensors[0].untyped_storage()
    data = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(source)
    memory[start : start + len(data)].copy_(data)
    for tensor in tensors:
        offset = start // tensor.dtype.itemsize + tensor.storage_offset()
        tensor.set_(memory.untyped_storage(), offset, tensor.shape, tensor.stride())
    del data, source
    if memory.device.type == "cuda":
        torch.cuda.empty_cache()  # the old memory is returned before more is mapped
