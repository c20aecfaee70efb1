"""EngineAdapters: an engine's adapters, from requests to slots."""

import os

from nanovllm.adapters.adapter import Adapter
from nanovllm.adapters.parts import parts_of
from nanovllm.adapters.place_command import PlaceAdapter
from nanovllm.adapters.slot_table import AdapterSlotTable
from nanovllm.adapters.store import AdapterStore
from nanovllm.engine.errors import NotReadyError
from nanovllm.engine.features import RequestAdapters
from nanovllm.engine.run.model_runner import ModelRunner
from nanovllm.engine.schedule.sequence import SequenceStatus
from nanovllm.lora_request import LoRARequest, named_adapters

WAIT_SECONDS = 0.01


class EngineAdapters(RequestAdapters):
    """The host's store, and the slots on the devices."""

    def __init__(self, runner: ModelRunner) -> None:
        parts, config = parts_of(runner.shard), runner.config
        self._runner = runner
        self.store = AdapterStore(parts.read, config.max_cpu_loras, parts.tensors)
        self.slot_table = AdapterSlotTable(config.max_loras, self.store, self._place)
        self.admission_filter = self.slot_table
        self._named = named_adapters(config.lora_modules)
        self._kept = [self.store.accept(request) for request in self._named.values()]

    def _place(self, adapter: Adapter, slot: int) -> None:
        self._runner.everywhere(PlaceAdapter(slot, adapter.number, adapter.path))

    def read(self, lora_request: LoRARequest) -> Adapter:
        """Read an adapter for later requests; raises if it does not fit the model."""
        return self.store.accept(lora_request)

    def named(self, name: str | None) -> LoRARequest | None:
        """The adapter of `lora_modules` with this name, if there is one."""
        return self._named.get(name or "")

    def failures(self) -> dict[int, Exception]:
        """Requests that wait for adapters that cannot be read, by id, and why."""
        failed = self.slot_table.take_failed().items()
        return {s.request_id: e for s, e in failed if s.status is SequenceStatus.WAITING}

    def wait(self) -> None:
        """Wait a short time while adapters are read and there is nothing else to do."""
        if self.store.is_loading:
            self.store.wait(WAIT_SECONDS)

    def reset(self) -> None:
        """Mark all slots as empty. For use after an interrupt; nothing runs."""
        self.slot_table.reset()

    def refuse(self, reason: NotReadyError | None) -> None:
        """Read no adapters for this reason; with None, go on."""
        self.store.refuse(reason)

    def close(self) -> None:
        """Read no more, and drop what is in the host's memory. Not in a forked process."""
        if os.getpid() == self._runner.owner:
            self.store.close()
