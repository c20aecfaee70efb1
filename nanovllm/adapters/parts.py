"""AdapterPart: one rank's slots."""

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanovllm.adapters.adapter import number_of
from nanovllm.adapters.peft import read_adapter
from nanovllm.adapters.slot_memory import AdapterSlots
from nanovllm.config import Config
from nanovllm.engine.engine_config import most_kept
from nanovllm.engine.run.device_table import UNMARKED, DeviceTable
from nanovllm.engine.run.padded import Fill, PrefillSize
from nanovllm.engine.run.shard import Shard
from nanovllm.engine.run.step_inputs import MARKS, StepInputs
from nanovllm.engine.run.step_part import StepPart
from nanovllm.engine.run.transfer import Array, upload_ahead
from nanovllm.engine.schedule.batch import Size
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.engine.start.placement import Placement
from nanovllm.kernels.plain.read_table import Decoding
from nanovllm.layers.context import ADAPTERS
from nanovllm.layers.lora import AdapterRows, group_rows
from nanovllm.models.decoder import CausalLM


class AdapterPart(StepPart):
    """The slots in a rank's layers. `tensors` are the adapters in its host memory, by number.

    Rank 0's store keeps them there; other ranks keep those that were placed last. A sequence's mark
    is the slot of its adapter.
    """

    name = ADAPTERS
    marks_rows = True

    def __init__(
        self, model: CausalLM, placement: Placement, num_slots: int, max_rank: int, most: int
    ) -> None:
        self._model, self._max_rank, self._most = model, max_rank, most
        self._device, self._kernels = placement.device, placement.backend.kernels
        self.slots = AdapterSlots(model, num_slots, max_rank)
        self.tensors: OrderedDict[int, Any] = OrderedDict()  # the last used comes last

    def close(self) -> None:
        """Let go of the model and the slots; nothing can be read or placed afterwards."""
        del self._model, self.slots
        self.tensors.clear()

    def read(self, path: Path, number: int) -> Any:
        """An adapter's tensors, pinned for a GPU; an error names what is wrong with its files.

        Files that no longer have this number are an error. Peak memory: one more pair of matrices.
        If the host cannot pin more memory, tensors are not pinned.
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

    def mark_of(self, seq: Sequence) -> int:
        """The slot of a running sequence's adapter."""
        adapter = seq.parts.adapter
        return UNMARKED if adapter is None else int(adapter.slot)

    def sizes(self, placement: Placement, largest: int, others: list[Size]) -> list[Size]:
        """Sizes of decode steps with adapters: fewer, because only some steps have adapters."""
        del placement
        return adapted_sizes(largest, others)

    def in_prefill(self, inputs: StepInputs, tokens: Array | None = None) -> AdapterRows | None:
        """The adapters of a prefill's tokens, or of these `tokens`; None if there are none."""
        slots = inputs.arrays.get(MARKS)
        if slots is None:
            return None
        (uploaded,) = upload_ahead(self._device, slots if tokens is None else slots[tokens])
        return self._rows(uploaded)

    def padded(self, size: PrefillSize) -> "PaddedMarks | None":
        """The adapters of captured prefills, if the size has some."""
        return PaddedMarks(size.num_tokens, self._rows) if size.is_marked else None

    def in_decode(self, table: DeviceTable, size: Size, decoding: Decoding) -> AdapterRows | None:
        """The adapters of a decode step's queries; None if no sequence has one."""
        del decoding
        if not size.is_marked:
            return None
        slots = table.marks.index_select(0, table.columns.batch[: size.num_seqs])
        if size.num_queries > 1:
            slots = slots[:, None].expand(-1, size.num_queries).flatten()
        return self._rows(slots)

    def _rows(self, slots: torch.Tensor) -> AdapterRows:
        return group_rows(slots, self.slots.num_slots, self._kernels)

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


class PaddedMarks:
    """The slots of a captured prefill's tokens, as many as `words`; none for padding."""

    def __init__(self, words: int, rows_of: Callable[[torch.Tensor], AdapterRows]) -> None:
        self.words, self._rows_of = words, rows_of

    def filler(self, inputs: StepInputs) -> Fill:
        """What writes a step's slots, which always have room."""
        return functools.partial(self._fill, inputs.arrays[MARKS])

    def _fill(self, marks: Array, words: Array) -> None:
        words[: len(marks)] = marks
        words[len(marks) :] = UNMARKED

    def read(self, words: torch.Tensor) -> AdapterRows:
        """The adapters of the rows."""
        return self._rows_of(words.int())


def parts_of(shard: Shard) -> AdapterPart:
    """The adapter parts of a shard that has adapters."""
    return shard.part(AdapterPart)


def adapter_parts(config: Config, model: CausalLM, placement: Placement) -> AdapterPart:
    """Make the slots in a model's layers, all of them empty."""
    most = most_kept(config)
    return AdapterPart(model, placement, config.max_loras, config.max_lora_rank, most)


def adapted_sizes(largest: int, others: list[Size]) -> list[Size]:
    """Decode steps with adapters for up to `largest` sequences, and `others` with adapters."""
    powers = (1 << exponent for exponent in range(largest.bit_length()))
    numbers = {n for power in powers for n in (power, power * 3 // 2) if power != 1}
    plain = [Size(number) for number in sorted({1, *numbers, largest}) if number <= largest]
    return [size._replace(is_marked=True) for size in [*plain, *others]]
