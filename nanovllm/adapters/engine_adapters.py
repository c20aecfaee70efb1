"""AdapterCalls: an engine's adapters, from requests to slots."""

import os

from nanovllm.adapters.adapter import Adapter
from nanovllm.adapters.parts import parts_of
from nanovllm.adapters.place_command import PlaceAdapter
from nanovllm.adapters.slot_table import Residents
from nanovllm.adapters.store import AdapterStore
from nanovllm.engine.run.model_runner import ModelRunner
from nanovllm.engine.schedule.sequence import SequenceStatus
from nanovllm.lora_request import named_adapters

WAIT_SECONDS = 0.01


class AdapterCalls:
    """The host's store, and the slots on the devices. `named` are those of `lora_modules`."""

    def __init__(self, runner: ModelRunner) -> None:
        parts, config = parts_of(runner.shard), runner.config
        self._runner = runner
        self.store = AdapterStore(parts.read, config.max_cpu_loras, parts.tensors)
        self.residents = Residents(config.max_loras, self.store, self._place)
        self.named = named_adapters(config.lora_modules)
        self._kept = [self.store.accept(request) for request in self.named.values()]

    def _place(self, adapter: Adapter, slot: int) -> None:
        self._runner.everywhere(PlaceAdapter(slot, adapter.number, adapter.path))

    def failures(self) -> dict[int, Exception]:
        """Requests that wait for adapters that cannot be read, by id, and why."""
        failed = self.residents.take_failed().items()
        return {s.request_id: e for s, e in failed if s.status is SequenceStatus.WAITING}

    def close(self) -> None:
        """Read no more, and drop what is in the host's memory. Not in a forked process."""
        if os.getpid() == self._runner.owner:
            self.store.close()

    def wait(self) -> None:
        """Wait a little while adapters are read, as nothing else is to be done."""
        if self.store.is_loading:
            self.store.wait(WAIT_SECONDS)
