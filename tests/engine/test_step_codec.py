"""What the other ranks are told of a step is the step, and no more than is new."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.engine.batch import Batch
from nanovllm.engine.inputs import BlockTables, StepInputs, decode_inputs, prefill_inputs
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step_codec import StepCodec
from nanovllm.sampling_params import SamplingParams


def assert_equal(one: StepInputs, other: StepInputs) -> None:
    for field in dataclasses.fields(StepInputs):
        a, b = getattr(one, field.name), getattr(other, field.name)
        assert (a is None) == (b is None), field.name
        if a is not None:
            assert a.dtype == b.dtype and np.array_equal(a, b), field.name


def make_seq(num_tokens: int, block_table: list[int], num_scheduled: int = 1) -> Sequence:
    seq = Sequence(list(range(num_tokens)), SamplingParams())
    seq.block_table = block_table
    seq.num_scheduled_tokens = num_scheduled
    seq.num_cached_tokens = num_tokens - num_scheduled
    return seq


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_step_is_not_what_was_sent(data: st.DataObject) -> None:
    """Batches that grow, shrink and stay, tables that change a little or altogether."""
    sender, receiver = StepCodec(), StepCodec()
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
        inputs = prefill_inputs(batch, 4) if is_prefill else decode_inputs(batch, 4, BlockTables())
        if data.draw(st.booleans()):
            inputs.prompt_rows = inputs.shared_rows = np.arange(step, dtype=np.int64)
            inputs.copied_blocks = np.arange(2 * step, dtype=np.int32)
        assert_equal(receiver.decode(bytearray(sender.encode(inputs))), inputs)


def test_prompts_travel_again_at_every_step() -> None:
    """64 sequences of 65,536 tokens: a decode step is told of the 64 new ones, and new blocks."""
    sender, receiver, sizes = StepCodec(), StepCodec(), []
    seqs = [make_seq(65_536, list(range(4096))) for _ in range(64)]
    for step in range(40):
        for seq in seqs:
            seq.num_cached_tokens = 65_535 + step
            if seq.num_cached_tokens == 16 * len(seq.block_table):
                seq.block_table.append(step)
            seq.token_ids.append(step)
        inputs = decode_inputs(Batch(seqs, is_prefill=False), 16, BlockTables())
        message = sender.encode(inputs)
        assert_equal(receiver.decode(bytearray(message)), inputs)
        sizes.append(len(message))
    assert sizes[0] > 64 * 4096 * 4, "the first step says it all"
    assert max(sizes[1:]) < 64 * (3 * 8 + 4 + 8) + 1000
