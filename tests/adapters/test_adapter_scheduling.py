"""Which adapters get slots: scheduling fuzzed with them, order, starvation, and what is left."""

import random
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from audits import audit_adapters
from simulation import Simulation, walk

from nanovllm.adapters.adapter import Adapter
from nanovllm.adapters.slot_table import AdapterSlotTable
from nanovllm.adapters.store import AdapterStore
from nanovllm.config import Config
from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.errors import NotReadyError
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.parts import SequenceParts
from nanovllm.engine.schedule.scheduler import Scheduler
from nanovllm.engine.schedule.sequence import Sequence, SequenceStatus
from nanovllm.lora_request import LoRARequest
from nanovllm.sampling_params import SamplingParams


class RandomStore:
    """Adapters that are in the host's memory, or come there, at random."""

    def __init__(self, rng: random.Random, most: int) -> None:
        self.most, self._rng = most, rng
        self.wanted: list[Adapter] = []
        self.has_refused = False

    def is_ready(self, adapter: Adapter) -> bool:
        is_ready = self._rng.random() < 0.7
        self.has_refused |= not is_ready
        return is_ready

    def want(self, adapters: Iterable[Adapter]) -> None:
        self.wanted = [*adapters]


class AdaptedSimulation(Simulation):
    """Requests with random adapters, for which there are few slots."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.choice = random.Random(self.num_slots)
        self.slots: dict[int, Adapter] = {}
        self.known = [Adapter(number, Path("/a")) for number in range(1, self.choice.randint(2, 6))]
        self.store = RandomStore(self.choice, self.choice.randint(1, 4))
        store: Any = self.store
        self.slot_table = AdapterSlotTable(self.choice.randint(1, 3), store, self.place)
        layout, drafting = self.scheduler.layout, self.scheduler.drafting
        self.scheduler = Scheduler(self.config, layout, drafting, self.slot_table)
        self.set_least()

    def place(self, adapter: Adapter, slot: int) -> None:
        """A slot is filled only when no running sequence holds it."""
        assert all(
            s.parts.adapter is None or s.parts.adapter.slot != slot for s in self.scheduler.running
        )
        self.slots[slot] = adapter

    def adapter(self) -> Adapter | None:
        return self.choice.choice([None, *self.known])

    def waits_for_adapter(self) -> bool:
        return self.store.has_refused

    def restart(self) -> None:
        self.slot_table.reset()
        super().restart()

    def step(self, tokens: list[int]) -> None:
        self.store.has_refused = False
        super().step(tokens)

    def check_batch(self, batch: Batch) -> None:
        super().check_batch(batch)
        for seq in batch.seqs:
            adapter = seq.parts.adapter
            assert adapter is None or self.slots[adapter.slot] is adapter

    def check_state(self) -> None:
        super().check_state()
        audit_adapters(self.slot_table, self.scheduler.running)
        assert all(adapter.error is None for adapter in self.known)


@pytest.mark.parametrize(
    "seeds", [range(30), pytest.param(range(30, 130), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_random_walks_with_adapters(seeds: range) -> None:
    """Every request finishes, reads its own adapter's KV, and runs only while it holds a slot."""
    simulations = [walk(seed, make=AdaptedSimulation) for seed in seeds]
    assert sum(simulation.scheduler.num_preemptions for simulation in simulations) > 20


class Queue:
    """A scheduler with adapters that are all in the host's memory."""

    def __init__(self, num_slots: int, max_num_seqs: int = 8) -> None:
        store: Any = AdapterStore(lambda path, number: path, 16)
        self.slot_table = AdapterSlotTable(num_slots, store, lambda adapter, slot: None)
        config = Config(
            "m", num_kvcache_blocks=64, kvcache_block_size=4, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=1024, max_model_len=64,
            overlap=False,
        )  # fmt: skip
        self.config = EngineConfig.settle(config, 64, 64)
        self.scheduler = Scheduler(self.config, admission_filter=self.slot_table)
        self.adapters = {name: store.accept(LoRARequest(name, f"/none/{name}")) for name in "ABCDE"}
        self.started: list[str] = []
        self._seen: set[Sequence] = set()

    def add(self, name: str, max_tokens: int = 3, **params: Any) -> Sequence:
        asked = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
        parts = SequenceParts(adapter=self.adapters.get(name))
        seq = Sequence([1, 2, 3], asked, max_model_len=64, parts=parts)
        self.scheduler.add(seq)
        return seq

    def step(self) -> None:
        batch = self.scheduler.schedule()
        assert batch is not None, "no progress"
        self.scheduler.postprocess(batch, [1] * len(batch.sampling_seqs))
        audit_adapters(self.slot_table, self.scheduler.running)
        names = {id(adapter): name for name, adapter in self.adapters.items()}
        for seq in batch.seqs:
            if seq not in self._seen:
                self._seen.add(seq)
                self.started.append(names.get(id(seq.parts.adapter), "-"))

    def run(self) -> str:
        """The adapters of all sequences, in the order in which they were first computed."""
        while not self.scheduler.is_finished():
            self.step()
        return "".join(self.started)


@pytest.mark.parametrize(
    ("num_slots", "arrivals", "order"),
    [
        (5, "ABCDE-A", "ABCDE-A"),
        (1, "AB", "AB"),
        (1, "AAB-", "AA-B"),  # without an adapter, nothing is waited for
        (1, "ABA", "ABA"),  # no one passes who would hold the slot for longer
        (2, "ABCAB", "ABBCA"),  # A's slot is drained for C
        (2, "ABCDE", "ABCDE"),
    ],
)
def test_the_order_of_admission(num_slots: int, arrivals: str, order: str) -> None:
    queue = Queue(num_slots)
    for name in arrivals:
        queue.add(name)
    assert queue.run() == order


def test_endless_requests_of_one_adapter_do_not_starve_another() -> None:
    queue = Queue(1)
    late = None
    for index in range(60):  # of different lengths, so that some always run
        queue.add("A", 8 + 5 * index % 19)
        if index == 5:
            late = queue.add("B")
        for _ in range(3):
            queue.step()
    assert late is not None
    assert late.status is SequenceStatus.FINISHED


def test_aborted_and_finished_sequences_leave_slots_to_others() -> None:
    queue = Queue(1)
    holder = queue.add("A", 50)
    queue.add("B")
    for _ in range(5):
        queue.step()
    assert queue.started == ["A"]
    queue.scheduler.abort(holder)
    assert queue.run() == "AB"


def test_a_priority_gets_the_slot_first() -> None:
    queue = Queue(1)
    queue.add("A")
    queue.step()
    queue.add("B")
    queue.add("C", priority=-1)
    assert queue.run() == "ACB"


@pytest.mark.parametrize("kind", [OSError, TypeError, ValueError])  # of files that have changed
def test_a_slot_that_cannot_be_filled_ends_the_requests_that_wait_for_it(
    kind: type[Exception],
) -> None:
    def fail(adapter: Adapter, slot: int) -> None:
        raise kind("no")

    queue = Queue(1)
    queue.slot_table._place = fail
    seq = queue.add("A")
    assert queue.scheduler.schedule() is None
    assert [*queue.slot_table.take_failed()] == [seq]
    assert not queue.slot_table.adapters and not queue.slot_table.take_failed()
    queue.scheduler.abort(seq)


def test_an_error_of_the_device_is_no_error_of_an_adapter() -> None:
    def fail(adapter: Adapter, slot: int) -> None:
        raise RuntimeError("CUDA error")

    queue = Queue(1)
    queue.slot_table._place = fail
    seq = queue.add("A")
    with pytest.raises(RuntimeError, match="CUDA error"):
        queue.scheduler.schedule()
    assert seq.parts.adapter.error is None


def test_the_store_keeps_no_more_than_it_has_room_for() -> None:
    """Also when more adapters are waited for than the host's memory keeps."""
    store = AdapterStore(lambda path, number: path, 2)
    adapters = [store.accept(LoRARequest("a", f"/none/{i}")) for i in range(5)]
    assert len(store.tensors) == 2
    store.want(adapters)
    for adapter in adapters:
        while not store.is_ready(adapter):
            store.wait(0.1)
            assert len(store.tensors) <= 2
            store.want([adapter])
    store.close()


def test_the_store_keeps_what_is_wanted() -> None:
    """An adapter that the scheduler waits for stays, although another one was used later."""
    store = AdapterStore(lambda path, number: path, 2)
    wanted, other = (store.accept(LoRARequest("a", f"/none/{i}")) for i in range(2))
    store.want([wanted])
    store.accept(LoRARequest("a", "/none/2"))
    assert wanted.number in store.tensors and other.number not in store.tensors
    store.close()


def test_the_store_keeps_what_was_used_last() -> None:
    store = AdapterStore(lambda path, number: path, 2)
    first, second = (store.accept(LoRARequest("a", f"/none/{i}")) for i in range(2))
    assert store.is_ready(first)
    store.accept(LoRARequest("a", "/none/2"))
    assert first.number in store.tensors and second.number not in store.tensors
    store.close()


def test_the_least_recently_used_adapter_leaves_its_slot() -> None:
    """A was used after B."""
    queue = Queue(2)
    for name in "ABAC":
        queue.add(name)
        while not queue.scheduler.is_finished():
            queue.step()
    assert {*queue.slot_table.adapters} == {queue.adapters["A"], queue.adapters["C"]}


def test_nothing_is_read_while_there_is_a_reason() -> None:
    """An adapter that waits is read when it is asked for again, afterwards."""
    reads: list[Path] = []
    store = AdapterStore(lambda path, number: reads.append(path), 1)
    first, _ = (store.accept(LoRARequest("a", f"/none/{i}")) for i in range(2))
    store.refuse(NotReadyError("the engine sleeps"))
    with pytest.raises(NotReadyError, match="the engine sleeps"):
        store.accept(LoRARequest("b", "/none/3"))
    assert not store.is_ready(first)
    while store.is_loading:
        store.wait(0.1)
    assert not store.is_ready(first) and first.error is None and len(reads) == 2
    while store.is_loading:
        store.wait(0.1)
    store.refuse(None)
    while not store.is_ready(first):
        store.wait(0.1)
    assert len(reads) == 3
    store.close()


def test_a_thousand_adapters_leave_nothing_behind() -> None:
    """Accepted, placed, dropped, read again: tensors, slots, threads and names stay bounded."""
    reads: list[Path] = []

    def read(path: Path, number: int) -> bytearray:
        reads.append(path)
        return bytearray(100)

    threads = threading.active_count()
    store = AdapterStore(read, 3)
    slot_table = AdapterSlotTable(2, store, lambda adapter, slot: None)
    queue = Queue(2)
    queue.slot_table = slot_table
    queue.scheduler = Scheduler(queue.config, admission_filter=slot_table)
    for number in range(1000):
        queue.adapters = {
            "A": store.accept(LoRARequest("a", f"/none/{number}")),
            "B": store.accept(LoRARequest("b", f"/none/{number % 7}")),
        }
        queue.add("A", 1)
        queue.add("B", 1)
        while not queue.scheduler.is_finished():
            batch = queue.scheduler.schedule()
            if batch is None:
                store.wait(0.1)
                continue
            queue.scheduler.postprocess(batch, [1] * len(batch.sampling_seqs))
            audit_adapters(slot_table, queue.scheduler.running)
        assert len(store.tensors) <= 3 and len(slot_table.adapters) <= 2
    batch = None
    queue.adapters.clear()
    assert len(reads) >= 1000
    assert len(store._known) <= 5 and not store.is_loading
    assert threading.active_count() <= threads + 1
    store.close()
    assert threading.active_count() == threads and not store.tensors
