"""A step arrives at the other ranks as it was sent, and holds only what has changed."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from nanovllm.engine.ranks.codec import FLAGS, decode, encode
from nanovllm.engine.run.device_table import TableLayout
from nanovllm.engine.run.ledger import Ledger
from nanovllm.engine.run.step_inputs import StepInputs, step_inputs
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


def assert_equal(one: StepInputs, other: StepInputs) -> None:
    assert (one.prefill is None) == (other.prefill is None)
    assert (one.num_seqs, one.width) == (other.num_seqs, other.width)
    for name in FLAGS:
        assert getattr(one, name) is getattr(other, name)
    assert one.arrays.keys() == other.arrays.keys()
    pairs = [*zip(one.changes, other.changes, strict=True)]
    pairs += [(array, other.arrays[name]) for name, array in one.arrays.items()]
    if one.prefill is not None:
        names = [field.name for field in dataclasses.fields(one.prefill)]
        pairs += [(getattr(one.prefill, name), getattr(other.prefill, name)) for name in names]
    for a, b in pairs:
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype and np.array_equal(a, b)
            assert a.flags.aligned and b.flags.aligned


def make_seq(num_tokens: int, block_table: list[int], num_scheduled: int = 1) -> Sequence:
    seq = Sequence(list(range(num_tokens)), SamplingParams())
    seq.block_tables = [block_table]
    seq.num_scheduled_tokens = num_scheduled
    seq.num_cached_tokens = num_tokens - num_scheduled
    return seq


@given(st.data())
@settings(max_examples=examples(300), deadline=None)
def test_a_step_arrives_as_it_was_sent(data: st.DataObject) -> None:
    """Batches grow, shrink and stay; tables change a little or completely."""
    ledger = Ledger(TableLayout(10, 20, 16))
    seqs: list[Sequence] = []
    for step in range(data.draw(st.integers(1, 10))):
        for seq in seqs:
            if data.draw(st.booleans()):
                seq.block_table.append(step + 7)
        if data.draw(st.booleans()) and seqs:
            seqs.pop(data.draw(st.integers(0, len(seqs) - 1)))
        if data.draw(st.booleans()) or not seqs:
            blocks = data.draw(st.integers(1, 6))
            seqs.append(make_seq(4 * blocks, list(range(step, step + blocks)), blocks))
        is_prefill = data.draw(st.booleans())
        batch = Batch(seqs, is_prefill)
        inputs = step_inputs(batch, 4, ledger)
        for name in FLAGS:
            setattr(inputs, name, data.draw(st.booleans()))
        if inputs.prefill is not None and data.draw(st.booleans()):
            some = np.arange(step, dtype=np.int64)
            blocks = np.arange(2 * step, dtype=np.int32)
            inputs.prefill = dataclasses.replace(
                inputs.prefill, shared_samples=some, copied_blocks=blocks
            )
            inputs.arrays = {"reported_tokens": some, "marks": blocks}
        assert_equal(decode(bytearray(encode(inputs))), inputs)


def test_a_decode_step_sends_only_what_has_changed() -> None:
    """64 sequences of 65,536 tokens: a decode step sends new blocks, and nothing else."""
    ledger, sizes = Ledger(TableLayout(64, 5000, 16)), []
    seqs = [make_seq(65_536, list(range(4096))) for _ in range(64)]
    for step in range(40):
        grown = 0
        for seq in seqs:
            seq.num_cached_tokens = 65_535 + step
            if seq.num_cached_tokens == 16 * len(seq.block_table):
                seq.block_table.append(step)
                grown += 1
            seq.token_ids.append(step)
        message = encode(step_inputs(Batch(seqs, is_prefill=False), 16, ledger))
        sizes.append((len(message), grown))
    assert sizes[0][0] > 64 * 4096 * 4, "the first step sends everything"
    assert sum(grown for _, grown in sizes) == 3 * 64
    assert all(size == sizes[2][0] + 12 * grown < 1000 for size, grown in sizes[2:])
