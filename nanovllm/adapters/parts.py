"""AdapterParts: one rank's slots."""

import contextlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from nanovllm.adapters.adapter import number_of
from nanovllm.adapters.peft import read_adapter
from nanovllm.adapters.slots import AdapterSlots
from nanovllm.config import Config
from nanovllm.engine.engine_config import most_kept
from nanovllm.engine.run.shard import Shard
from nanovllm.kernels.table import Kernels
from nanovllm.layers.lora import AdapterRows, group_rows
from nanovllm.models.decoder import CausalLM


class AdapterParts:
    """The slots in a rank's layers. `tensors` are the adapters in its host memory, by number.

    Rank 0's store keeps them there; on other ranks they are those of the last placements.
    """

    def __init__(self, model: CausalLM, num_slots: int, max_rank: int, most: int) -> None:
        self._model, self._max_rank, self._most = model, max_rank, most
        self.slots = AdapterSlots(model, num_slots, max_rank)
        self.tensors: OrderedDict[int, Any] = OrderedDict()  # the last used comes last

    def close(self) -> None:
        """Let go of the model and the slots; nothing can be read or placed afterwards."""
        del self._model, self.slots
        self.tensors.clear()

    def read(self, path: Path, number: int) -> Any:
        """An adapter's tensors, pinned for a GPU; an error names what is wrong with its files.

        Files that no longer have this number are an error. Peak memory: a pair of matrices more.
        Where the host pins no more, they stay as they are.
        """
        tensors = dict(read_adapter(path, self._model, self._max_rank))
        if number_of(path) != number:
            raise ValueError(
                f"lora_path {str(path)!r}: the files have changed while they were read, or since a"
                " request that waits for them was queued; write a changed adapter to a new"
                " directory"
            )
        if self._model.model.norm.weight.is_cuda:
            with contextlib.suppress(RuntimeError):
                for name, pair in tensors.items():
                    tensors[name] = pair.pinned()
        return tensors

    def rows(self, slots: torch.Tensor, kernels: Kernels) -> AdapterRows:
        """The adapters of rows with these slots, in int32; below 0: none."""
        return group_rows(slots, self.slots.num_slots, kernels)

    def place(self, slot: int, number: int, path: Path) -> None:
        """Fill a slot, without waiting for the device.

        Without the tensors in the host's memory, the files are read.
        """
        tensors = self.tensors.get(number)
        if tensors is None:
            tensors = self.read(path, number)
        self.slots.place(slot, tensors)

    def keep(self, number: int, path: Path) -> None:
        """Read an adapter into this rank's memory, in place of the least recently used one."""
        tensors = self.tensors.pop(number, None)
        self.tensors[number] = self.read(path, number) if tensors is None else tensors
        while len(self.tensors) > self._most:
            del self.tensors[next(iter(self.tensors))]


def parts_of(shard: Shard) -> AdapterParts:
    """The slots of a shard that has adapters."""
    assert isinstance(shard.adapters, AdapterParts)
    return shard.adapters


def adapter_parts(config: Config, model: CausalLM) -> AdapterParts:
    """The slots that an engine with adapters has in its layers, all of them empty."""
    most = most_kept(config)
    return AdapterParts(model, config.max_loras, config.max_lora_rank, most)
