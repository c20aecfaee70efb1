"""What steps with drafts need: a draft model that has caught up, and the drafts for some draws."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import takewhile

import numpy as np

from nanovllm.drafting.drafted_blocks import Lack
from nanovllm.engine.run.device_table import NO_CHANGES, DeviceTable, TableChanges
from nanovllm.engine.run.step_inputs import PrefillInputs, StepInputs, token_arrays
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.sequence import PENDING, Sequence
from nanovllm.kernels.plain.read_table import NO_DRAFT


def with_catch_ups(inputs: StepInputs, block_size: int, budget: int) -> list[StepInputs]:
    """The step, and before it those in which the draft model computes what it `lacks`.

    Each of these has `budget` tokens at most. The first one changes the device table.
    """
    if not inputs.lacks:
        return [inputs]
    steps, changes = [], inputs.changes
    for part in _parts(inputs.lacks, budget):
        steps.append(_catch_up(part, block_size, inputs.width, changes))
        changes = NO_CHANGES
    return [*steps, replace(inputs, changes=changes, lacks=[])]


def _parts(lacks: list[Lack], budget: int) -> Iterator[list[Lack]]:
    part: list[Lack] = []
    room = budget
    for lack in lacks:
        start = lack.start
        while start < lack.end:
            end = min(lack.end, start + room)
            part.append(lack._replace(start=start, end=end))
            start, room = end, room - (end - start)
            if not room:
                yield part
                part, room = [], budget
    if part:
        yield part


def _catch_up(part: list[Lack], block_size: int, width: int, changes: TableChanges) -> StepInputs:
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


def known_drafts(batch: Batch, table: DeviceTable) -> Mapping[Sequence, list[int]]:
    """The drafts that a step's draws depend on. It waits for them if the device has guessed them.

    Most draws do not depend on them, or only on their number.
    """
    number = batch.num_drafts
    if not number or not any(seq.is_narrowed for seq in batch.seqs):
        return batch.drafts
    if not any(seq.reads_tokens for seq in batch.seqs):
        return dict.fromkeys(batch.seqs, [PENDING] * number)
    rows = table.state.batch[: len(batch.seqs)].long()
    guessed = table.state.drafts.tokens[rows, :number].tolist()
    known = ([*takewhile(NO_DRAFT.__ne__, row)] for row in guessed)
    return dict(zip(batch.seqs, known, strict=True))
