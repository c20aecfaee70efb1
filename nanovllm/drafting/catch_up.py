"""Steps in which a draft model catches up; drafts that draws must wait for."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import takewhile

import numpy as np

from nanovllm.drafting.drafted_blocks import Missing
from nanovllm.engine.run.device_table import NO_CHANGES, DeviceTable, TableChanges
from nanovllm.engine.run.step_inputs import PrefillInputs, StepInputs, token_arrays
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.sequence import PENDING, Sequence
from nanovllm.kernels.plain.read_table import NO_DRAFT


def with_catch_ups(
    inputs: StepInputs, missing: list[Missing], block_size: int, budget: int
) -> list[StepInputs]:
    """The step, and before it steps in which the draft model computes the `missing` tokens.

    Each of these steps has at most `budget` tokens. The first one changes the device table.
    """
    steps, changes = [], inputs.changes
    for part in _parts(missing, budget):
        steps.append(_catch_up(part, block_size, inputs.width, changes))
        changes = NO_CHANGES
    return [*steps, replace(inputs, changes=changes)]


def _parts(missing: list[Missing], budget: int) -> Iterator[list[Missing]]:
    part: list[Missing] = []
    room = budget
    for one in missing:
        start = one.start
        while start < one.end:
            end = min(one.end, start + room)
            part.append(one._replace(start=start, end=end))
            start, room = end, room - (end - start)
            if not room:
                yield part
                part, room = [], budget
    if part:
        yield part


def _catch_up(
    part: list[Missing], block_size: int, width: int, changes: TableChanges
) -> StepInputs:
    nothing = np.zeros(0, np.int64)
    seqs, rows, starts, ends = (list(column) for column in zip(*part, strict=True))
    prefill = PrefillInputs(
        *token_arrays(seqs, starts, ends, block_size),
        table_rows=np.array(rows, np.int64),
        sample_table_rows=nothing,
        sampled_tokens=nothing,
    )
    if not any(starts):
        width = 0
    return StepInputs(len(part), width, changes, prefill, catches_up=True)


def warm_up_step(prefill: PrefillInputs, width: int, longest: int) -> StepInputs:
    """A step in which the draft model computes a prefill's tokens, up to its longest position."""
    own = replace(prefill, positions=prefill.positions % longest)
    return StepInputs(0, width, NO_CHANGES, own, catches_up=True)


def drafts_read_by_draws(batch: Batch, table: DeviceTable) -> Mapping[Sequence, list[int]]:
    """The drafts that a step's draws depend on. Waits for them if the device has guessed them.

    Most draws do not depend on drafts, or only on their number.
    """
    number = batch.num_drafts
    if not number or not any(seq.is_narrowed for seq in batch.seqs):
        return batch.drafts
    if not any(seq.reads_tokens for seq in batch.seqs):
        return dict.fromkeys(batch.seqs, [PENDING] * number)
    rows = table.columns.batch[: len(batch.seqs)].long()
    guessed = table.columns.drafts.tokens[rows, :number].tolist()
    known = ([*takewhile(NO_DRAFT.__ne__, row)] for row in guessed)
    return dict(zip(batch.seqs, known, strict=True))
