"""AdapterSlotTable: which adapters have slots on the device, and which sequences may run next."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from nanovllm.adapters.adapter import NO_SLOT, Adapter
from nanovllm.adapters.store import AdapterStore
from nanovllm.engine.schedule.sequence import Sequence, SequenceStatus


class AdapterSlotTable:
    """The slots' adapters, in the order in which sequences were last admitted with them.

    The adapter of a running sequence keeps its slot; each call finds these adapters from the
    running sequences. If a waiting sequence's adapter gets no slot, other sequences may pass it:
    those without an adapter, and those with an adapter that has a slot. But each waiting adapter
    drains one slot, the least recently used first: later sequences do not run with the adapter in
    that slot, so that it becomes free when the running ones have ended. So each adapter gets a slot
    in turn.

    `place(adapter, slot)` fills a slot on the device.
    """

    def __init__(
        self, num_slots: int, store: AdapterStore, place: Callable[[Adapter, int], None]
    ) -> None:
        self.num_slots, self.store, self._place = num_slots, store, place
        self.adapters: OrderedDict[Adapter, None] = OrderedDict()  # the last used comes last
        self._failed: dict[Sequence, Exception] = {}

    def admissible(
        self, waiting: Iterable[Sequence], running: Iterable[Sequence]
    ) -> Iterator[Sequence]:
        """Waiting sequences that can run: their adapter has a slot or can get one. In queue order.

        A sequence that runs when the next one is asked for keeps its adapter in the slot. Adapters
        that cannot be read are reported by `take_failed`.
        """
        line = _Line(seq.parts.adapter for seq in running if seq.parts.adapter is not None)
        try:
            for seq in waiting:
                adapter = seq.parts.adapter
                if adapter in line.passed:
                    continue
                if adapter is None:
                    yield seq
                elif adapter.slot != NO_SLOT or self._enter(adapter, line):
                    yield seq
                    if seq.status is SequenceStatus.RUNNING:
                        self.adapters.move_to_end(adapter)
                        line.held.add(adapter)
                elif adapter.error is not None:
                    self._failed[seq] = adapter.error
        finally:
            self.store.want(line.waits)

    def take_failed(self) -> dict[Sequence, Exception]:
        """Waiting sequences with adapters that cannot be read, and why; each is returned once."""
        failed, self._failed = self._failed, {}
        return failed

    def reset(self) -> None:
        """Mark all slots as empty. For use after an interrupt; nothing runs."""
        for adapter in self.adapters:
            adapter.slot = NO_SLOT
        self.adapters.clear()
        self._failed.clear()

    def _enter(self, adapter: Adapter, line: "_Line") -> bool:
        """Give the adapter a slot. If there is none, it waits from here on; or it has failed."""
        if adapter.error is not None:
            return False
        is_ready = len(line.waits) < self.store.most and self.store.is_ready(adapter)
        left = [one for one in self.adapters if one not in line.passed]
        unheld = next((one for one in left if one not in line.held), None)
        if is_ready and (len(self.adapters) < self.num_slots or unheld is not None):
            return self._take_slot(adapter, unheld)
        line.waits.append(adapter)
        line.passed.add(adapter)
        if is_ready and left:
            line.passed.add(left[0])
        return False

    def _take_slot(self, adapter: Adapter, unheld: Adapter | None) -> bool:
        """Fill a free slot, or that of the adapter `unheld`. False: the adapter cannot be read."""
        if len(self.adapters) == self.num_slots:
            assert unheld is not None
            unheld.slot = NO_SLOT
            del self.adapters[unheld]
        used = {one.slot for one in self.adapters}
        slot = next(slot for slot in range(self.num_slots) if slot not in used)
        try:
            self._place(adapter, slot)
        except (OSError, TypeError, ValueError) as error:
            adapter.error = error
            return False
        self.adapters[adapter] = None  # before its slot: `reset` finds it
        adapter.slot = slot
        return True


class _Line:
    """The state of a queue up to a place in it: which adapters wait, and which ones are drained."""

    def __init__(self, held: Iterable[Adapter]) -> None:
        self.held = {*held}
        self.waits: list[Adapter] = []  # adapters that wait for a slot, in order
        self.passed: set[Adapter | None] = set()  # waiting adapters, and those being drained
