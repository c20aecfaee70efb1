"""States: who has which slot, where checkpoints are made, and which one goes first."""

import numpy as np
import pytest
import torch
from audits import audit_caches
from state_caches import (
    ALONE,
    SIZE,
    WITH_KV,
    admit,
    end,
    make_caches,
    make_seq,
    num_restored,
    run,
    run_and_free,
    step,
)

from nanovllm.engine.cache.caches import Caches
from nanovllm.engine.cache.groups import CacheGroups
from nanovllm.engine.cache.pools import KVPool
from nanovllm.engine.cache.pools_with_states import PoolsWithStates
from nanovllm.engine.cache.state_part import states_before_and_after
from nanovllm.engine.cache.state_pool import KV_PER_CHECKPOINT_BYTE, StatePool
from nanovllm.engine.cache.state_slots import StateLayout
from nanovllm.engine.run.device_table import DeviceTable, TableLayout
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.kernels.operands.state_step import StateStep
from nanovllm.kernels.plain.read_groups import read_slots
from nanovllm.kernels.plain.read_table import read_table
from nanovllm.layers.cache_spec import State, StateTensor
from nanovllm.layers.state_mixer import StateMixer


@pytest.mark.parametrize("windows", [WITH_KV, ALONE, (None, 3)])
@pytest.mark.parametrize("chunks", [(), (5,), (8, 8), (1, 16)])
def test_checkpoints_are_at_intervals_and_at_the_last_full_block(
    windows: tuple[int | None, ...], chunks: tuple[int, ...]
) -> None:
    caches = make_caches(windows)
    run_and_free(caches, range(23), *chunks)
    assert num_restored(caches, [*range(23), 99]) == 20
    assert num_restored(caches, range(23)) == 20
    assert num_restored(caches, [*range(19), 99, 98]) == 16
    assert num_restored(caches, [*range(9), 97, 96]) == 8
    assert num_restored(caches, [*range(7), 97, 96]) == 0, "no checkpoint, if there is KV or not"


def test_a_prompt_of_full_blocks_has_checkpoints_for_an_equal_one_and_for_the_next_turn() -> None:
    caches = make_caches()
    run_and_free(caches, range(8))
    assert num_restored(caches, range(8)) == 4
    assert len(caches.states.checkpoints) == 2
    assert num_restored(caches, range(11)) == 8


def test_a_step_writes_checkpoints_on_its_way_and_copies_the_one_at_its_end() -> None:
    caches = make_caches()
    seq = admit(caches, range(23))
    batch = step(caches, seq, 16)
    (own,) = seq.state_slots
    after = states_before_and_after(batch, np.array([0, 16]))["states_after"].tolist()
    assert after == [-1] * 7 + [seq.checkpoints[8]] + [-1] * 7 + [own]
    assert batch.copies == ([], [(own, seq.checkpoints[16])])


def test_a_hit_is_copied_before_the_step() -> None:
    caches = make_caches()
    run_and_free(caches, range(9))
    assert caches.states is not None
    (checkpoint,) = caches.states.checkpoints
    seq = admit(caches, [*range(9), 99, 98])
    batch = step(caches, seq)
    assert batch.copies.before == [(checkpoint, seq.state_slots[0])]
    assert (
        states_before_and_after(batch, np.array([0, 3]))["states_before"].tolist()
        == seq.state_slots
    )
    assert step(caches, make_running(caches)).copies.before == [], "once"


def make_running(caches: Caches) -> Sequence:
    return admit(caches, [77, 78])


def test_the_state_after_a_position_is_in_its_slot_of_a_ring() -> None:
    """So a step with two drafts replaces none that the next one may read."""
    caches = make_caches(slots_per_sequence=3)
    seq = admit(caches, range(5))
    end(caches, step(caches, seq))
    seq.token_ids.append(5)
    seq.num_scheduled_tokens = 1
    batch = Batch([seq], is_prefill=True, num_decodes=1, drafts={seq: [6, 7]})
    slots = states_before_and_after(batch, np.array([0, 3]))
    assert slots["states_starts"].tolist() == [5]
    assert slots["states_before"].tolist() == [seq.state_slots[4 % 3]]
    assert slots["states_after"].tolist() == [seq.state_slots[i % 3] for i in (5, 6, 7)]


@pytest.mark.parametrize(("num_right", "restored"), [(2, 8), (1, 8), (0, 0)])
def test_the_checkpoint_of_a_draft_counts_if_the_draft_is_right(
    num_right: int, restored: int
) -> None:
    """The last checkpoint is after the first draft; the prompt is too short for one."""
    caches = make_caches(slots_per_sequence=3)
    seq = admit(caches, range(3))
    seq.num_prompt_tokens = 1
    end(caches, step(caches, seq))
    seq.token_ids += [3, 4, 5, 6]
    seq.num_cached_tokens = 6
    seq.num_scheduled_tokens = 1
    assert caches.grow(seq, 9) == 9
    batch = Batch([seq], is_prefill=True, num_decodes=1, drafts={seq: [7, 8]})
    caches.plan(batch)
    assert batch.copies.after == [(seq.state_slots[7 % 3], seq.checkpoints[8])]
    seq.token_ids += [7, 8, 9][: num_right + 1] if num_right else [50]
    seq.num_cached_tokens, seq.num_scheduled_tokens = 7 + num_right, 0
    caches.publish(seq, seq.num_cached_tokens)
    caches.rewind(seq, seq.num_cached_tokens)
    assert not seq.checkpoints
    audit_caches(caches, [seq])
    caches.free(seq)
    assert num_restored(caches, range(10)) == restored


def test_the_least_recently_used_checkpoint_goes_first() -> None:
    caches = make_caches(num_checkpoints=2)
    run_and_free(caches, range(10, 15))
    run_and_free(caches, range(20, 25))
    run_and_free(caches, range(30, 35))
    assert num_restored(caches, range(10, 16)) == 4
    held = [admit(caches, [each]) for each in (1, 2, 3)]
    audit_caches(caches, held)
    for seq in held:
        caches.free(seq)
    assert num_restored(caches, range(10, 17)) == num_restored(caches, range(30, 36)) == 4
    assert num_restored(caches, range(20, 26)) == 0


def test_running_sequences_take_the_slots_of_checkpoints() -> None:
    """All slots are in use; those that have not been used for longest go."""
    caches = make_caches(num_checkpoints=1)
    assert caches.states is not None
    for start in range(10, 60, 10):
        run_and_free(caches, range(start, start + 5))
    assert len(caches.states.checkpoints) == 3, "slots of sequences that do not run, too"
    running = [admit(caches, [each]) for each in (1, 2, 3)]
    assert len(caches.states.checkpoints) == 1
    audit_caches(caches, running)
    for seq in running:
        caches.free(seq)
    assert num_restored(caches, range(50, 56)) == 4


def test_a_planned_checkpoint_is_lost_with_its_sequence() -> None:
    caches = make_caches()
    seq = admit(caches, range(23))
    step(caches, seq)
    assert len(seq.checkpoints) == 3
    caches.free(seq)
    audit_caches(caches, [])
    assert num_restored(caches, range(23)) == 0


def test_no_checkpoints_without_a_prefix_cache() -> None:
    caches = make_caches(num_checkpoints=0)
    seq = run(caches, range(23), 8)
    caches.free(seq)
    assert num_restored(caches, range(23)) == 0


@pytest.mark.parametrize("windows", [WITH_KV, ALONE])
def test_what_a_running_sequence_computes_after_the_cache_was_cleared_is_not_found(
    windows: tuple[int | None, ...],
) -> None:
    caches = make_caches(windows)
    seq = admit(caches, range(23))
    end(caches, step(caches, seq, 9))
    caches.clear([seq])
    end(caches, step(caches, seq))
    caches.free(seq)
    assert num_restored(caches, range(23)) == 0
    audit_caches(caches, [])


@pytest.mark.parametrize("windows", [WITH_KV, ALONE])
def test_a_sequence_waits_for_a_checkpoint_that_another_computes(
    windows: tuple[int | None, ...],
) -> None:
    caches = make_caches(windows)
    seq = admit(caches, range(23))
    in_progress = {*caches.in_progress(seq)}
    assert len(in_progress) == 3
    assert not caches.admit(make_seq([*range(9), 99]), in_progress)
    other = make_seq([*range(3), 99])
    assert caches.admit(other, in_progress), "it would gain nothing"
    end(caches, step(caches, seq, 9), other)
    third = make_seq([*range(9), 99])
    assert caches.admit(third, {*caches.in_progress(seq)})
    assert third.num_cached_tokens == 8
    assert other.num_cached_tokens == 0


@pytest.mark.parametrize("windows", [WITH_KV, ALONE])
def test_a_fork_gets_a_copy(windows: tuple[int | None, ...]) -> None:
    caches = make_caches(windows)
    seq, sibling = admit(caches, range(23)), make_seq(range(23))
    seq.num_scheduled_tokens = 23
    assert caches.fork(seq, sibling)
    caches.plan(batch := Batch([seq], is_prefill=True, forks=[(seq, sibling)]))
    assert (seq.state_slots[0], sibling.state_slots[0]) in batch.copies.after
    assert seq.state_slots != sibling.state_slots and sibling.room
    seq.num_cached_tokens = sibling.num_cached_tokens = 23
    caches.publish(seq, 23)
    for each in (sibling, seq):
        caches.free(each)
    audit_caches(caches, [])
    assert num_restored(caches, range(23)) == 20


# The pool


class Keeper(StateMixer):
    def __init__(self, *tensors: StateTensor) -> None:
        super().__init__()
        self.cache = State(tensors)


def make_pool(*mixers: Keeper, checkpoints: bool = True) -> StatePool:
    return StatePool(mixers, torch.bfloat16, torch.device("cpu"), 2, checkpoints)


def test_each_layer_has_a_part_of_all_slots() -> None:
    first = Keeper(StateTensor((3, 5)), StateTensor((2, 2), in_float32=True))
    second = Keeper(StateTensor((7,)))
    pool = make_pool(first, second)
    pool.allocate(4)
    tensors = [*first.states, *second.states]
    assert [tuple(tensor.shape) for tensor in tensors] == [(4, 3, 5), (4, 2, 2), (4, 7)]
    assert [t.dtype for t in tensors] == [torch.bfloat16, torch.float32, torch.bfloat16]
    for number, tensor in enumerate(tensors):
        assert not tensor.any() and tensor[0].data_ptr() % 64 == 0
        tensor[2] = number + 1
    pool.copy(np.array([2, 1, 1, 3]))
    for number, tensor in enumerate(tensors):
        assert (tensor[1:] == number + 1).all() and not tensor[0].any()


def test_slots_come_back_after_sleep() -> None:
    """A second call of either changes nothing."""
    keeper = Keeper(StateTensor((3, 5)), StateTensor((2, 2), in_float32=True))
    kv = KVPool(CacheGroups((), 0, 0), 4, torch.bfloat16, torch.device("cpu"))
    pools = PoolsWithStates(kv, [keeper], torch.bfloat16, 1, True)
    pools.wake_up()
    assert not keeper.states[0].numel()
    pools.allocate(0, 2)
    for _ in range(2):
        pools.sleep()
        assert not keeper.states[0].numel()
    for _ in range(2):
        pools.wake_up()
        assert [tuple(tensor.shape) for tensor in keeper.states] == [(4, 3, 5), (4, 2, 2)]


def test_a_quarter_of_the_memory_goes_to_checkpoints() -> None:
    """As much as the KV of `KV_PER_CHECKPOINT_BYTE` intervals' tokens; in whole blocks of 16."""
    pool = make_pool(Keeper(StateTensor((1000, 16), in_float32=True)))
    layout = pool.layout(num_blocks=1000, block_size=16, block_bytes=16 * 100)
    assert layout.interval % 16 == 0
    share = layout.num_checkpoints * pool.slot_bytes / (1000 * 16 * 100)
    assert abs(share - 1 / KV_PER_CHECKPOINT_BYTE) < 0.02
    assert layout.num_slots(10) == 2 + 2 * 10 + layout.num_checkpoints
    assert make_pool(checkpoints=False).layout(1000, 16, 1600) == StateLayout(2, 0, 0)
    alone = pool.layout(num_blocks=1000, block_size=16, block_bytes=0)
    assert (alone.interval, alone.num_checkpoints) == (256, 62)


# The step


def test_sequences_of_equal_lengths_are_computed_together() -> None:
    before, after = torch.tensor([4, 0, 5]), torch.tensor([-1, 4, 6, -1, 5])
    short, long = StateStep(before, after, ends=np.array([0, 2, 3, 5])).batches
    assert (short.rows.tolist(), long.rows.tolist()) == ([[2]], [[0, 1], [3, 4]])
    assert (short.before.tolist(), long.before.tolist()) == ([0], [4, 5])
    assert (short.after.tolist(), long.after.tolist()) == ([[6]], [[-1, 4], [-1, 5]])
    (decode,) = StateStep(before[:2], after[:4], num_queries=2).batches
    assert decode.rows.tolist() == [[0, 1], [2, 3]] and decode.after.tolist() == [[-1, 4], [6, -1]]


@pytest.mark.parametrize("queries", [1, 3])
def test_a_decode_step_finds_slots_by_position(queries: int) -> None:
    """Rows: of a sequence, of one that begins, of none, and one that has no slots."""
    layout = TableLayout(5, 9, SIZE, most_drafts=2, num_slots=3)
    table = DeviceTable(layout, torch.device("cpu"))
    table.slots[:2] = torch.tensor([[5, 6, 7], [8, 9, 4]])
    state = table.columns
    state.lengths[:4] = torch.tensor([10, 0, -1, 10])
    state.batch[:4] = torch.arange(4)
    state.drafts.limits.fill_(12)
    state.drafts.tokens[:4] = 1
    decoding = read_table(state, 4, 9, SIZE, queries)
    before, after = read_slots(table.slots, state, decoding)
    assert before.tolist() == [5, 0, 0, 0], "after position 9, 9 % 3 = 0"
    ring = [[6, 7, -1], [8, 9, 4], [-1] * 3, [-1] * 3]  # no draft is at position 12
    assert after.view(4, queries).tolist() == [row[:queries] for row in ring]
