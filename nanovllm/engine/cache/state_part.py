"""StatePart: where a step's sequences find and leave states, in slots of the state pool."""

from typing import Any

import numpy as np

from nanovllm.engine.cache.state_pool import StatePool
from nanovllm.engine.run.device_table import DeviceTable
from nanovllm.engine.run.padded import PaddedPart, PrefillSize
from nanovllm.engine.run.step_inputs import StepInputs
from nanovllm.engine.run.step_part import StepPart
from nanovllm.engine.run.transfer import Array, upload_ahead
from nanovllm.engine.schedule.batch import NO_COPIES, Batch, Size
from nanovllm.kernels.operands.state_step import StateStep
from nanovllm.kernels.plain.read_groups import read_slots
from nanovllm.kernels.plain.read_table import Decoding
from nanovllm.layers.context import STATES


class StatePart(StepPart):
    """Copies slots around a step, and gives the layers the slots that they read and write.

    Pairs of slots (from, to) are in `copied_before` and `copied_after`.
    """

    name = STATES

    def __init__(self, pool: StatePool) -> None:
        self._pool = pool

    def add_arrays(self, inputs: StepInputs, batch: Batch) -> None:
        """Add the slots of a prefill, and the pairs that a step copies."""
        if inputs.prefill is not None:
            inputs.arrays |= states_before_and_after(batch, inputs.prefill.cu_seqlens_q)
        if batch.copies is not NO_COPIES:
            named = zip(("copied_before", "copied_after"), batch.copies, strict=True)
            copied = {name: np.array(pairs, np.int32).ravel() for name, pairs in named if pairs}
            inputs.arrays |= copied

    def before(self, inputs: StepInputs) -> None:
        """Copy slots that sequences continue from."""
        self._copy(inputs.arrays.get("copied_before"))

    def after(self, inputs: StepInputs) -> None:
        """Copy slots that the step has written."""
        self._copy(inputs.arrays.get("copied_after"))

    def _copy(self, pairs: Array | None) -> None:
        if pairs is not None:
            self._pool.copy(pairs)

    def in_prefill(self, inputs: StepInputs, tokens: Array | None = None) -> StateStep | None:
        """Where a prefill finds and leaves states; a warm-up leaves none. None for the head."""
        if tokens is not None or inputs.prefill is None:
            return None
        ends = inputs.prefill.cu_seqlens_q
        before = inputs.arrays.get("states_before", np.zeros(len(ends) - 1, np.int64))
        after = inputs.arrays.get("states_after", np.full(int(ends[-1]), -1))
        slots = upload_ahead(self._pool.device, before, after)
        starts = inputs.arrays.get("states_starts")
        return StateStep(slots[0], slots[1], ends, starts=starts, kept=after)

    def padded(self, size: PrefillSize) -> PaddedPart:
        """Where captured prefills find and leave states."""
        from nanovllm.engine.cache.padded_states import PaddedStates

        return PaddedStates(size)

    def in_decode(self, table: DeviceTable, size: Size, decoding: Decoding) -> Any:
        """Where the queries of a decode step find and leave states."""
        before, after = read_slots(table.slots, table.columns, decoding)
        return StateStep(before, after, num_queries=size.num_queries)


def states_before_and_after(batch: Batch, q_ends: Array) -> dict[str, Array]:
    """The slots in which a prefill finds and leaves states, and its sequences' first positions.

    It leaves the states after the last scheduled token, after each draft, and at checkpoints.
    """
    before = np.zeros(len(batch.seqs), np.int64)
    after = np.full(int(q_ends[-1]), -1, np.int64)
    for index, (seq, q_end) in enumerate(zip(batch.seqs, q_ends[1:].tolist(), strict=True)):
        own, start, num_own = seq.state_slots, seq.num_cached_tokens, len(seq.state_slots)
        if start:
            before[index] = own[(start - 1) % num_own]
        end = start + seq.num_scheduled_tokens + len(batch.drafts.get(seq, ()))
        first = start + seq.num_scheduled_tokens - 1  # of the tokens with kept states
        for position in range(first, end):
            after[q_end - end + position] = own[position % num_own]
        for length, slot in seq.checkpoints.items():
            if start < length <= first:
                after[q_end - end + length - 1] = slot
    starts = np.array([seq.num_cached_tokens for seq in batch.seqs], np.int64)
    return {"states_before": before, "states_after": after, "states_starts": starts}
