"""The ledger and a draft model's KV memory, in random walks of the scheduler.

What the simulation notes for the large model's slots it notes for the draft model's: which token,
after which tokens, was computed there. Before each step with drafts the draft model must have
computed all of a sequence but what the step itself gives it to read.
"""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import selection
from simulation import MOST_DRAFTS, Simulation, Slot, walk

from nanovllm.drafting.costs import Candidate
from nanovllm.drafting.table_drafting import TableDrafting
from nanovllm.drafting.table_rows import TableRows
from nanovllm.engine.run.device_table import TableLayout
from nanovllm.engine.run.ledger import Ledger
from nanovllm.engine.run.step_inputs import step_inputs
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.sequence import Sequence


class Whims:
    """Costs by which some steps in a row have the same number of drafts, often none."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.number, self.left = rng, 0, 0

    def worthwhile(
        self, candidates: list[Candidate], num_tokens: int, waits: bool
    ) -> Iterator[int]:
        del num_tokens, waits
        if not self.left:
            self.left = self.rng.choice([1, 1, 2, 3, 10, 30])
            self.number = self.rng.choice([0, 0, 1, 2, MOST_DRAFTS, MOST_DRAFTS])
        self.left -= 1
        return (min(self.number, candidate.limit) for candidate in candidates)


class DraftedSimulation(Simulation):
    """With the device table that the ledger writes, and a draft model of limited length."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"in_table": True, "draft_seed": options["max_num_seqs"]})
        drafting = self.scheduler.drafting
        assert isinstance(drafting, TableDrafting)
        drafting.costs = Whims(self.rng)
        drafting.longest = self.most_drafted = self.rng.choice([7, 20, 50, 1 << 30])
        max_blocks = -(-self.longest // self.block_size)
        self.layout = TableLayout(
            self.config.max_num_running, max_blocks, self.block_size, MOST_DRAFTS
        )
        self.rows = TableRows(self.layout, self.most_drafted)
        self.ledger = Ledger(self.layout, self.rows)
        self.words = np.zeros(self.layout.size, np.int64)  # the device table
        self.advancing: list[tuple[Batch, Sequence, int, int]] = []  # rows, and tokens before
        self.recent: dict[int, list[int]] = {}  # by row: what its last step with drafts has added
        self.drafted: dict[Slot, int] = {}  # the draft model's memory
        self.num_caught_up = 0

    def interrupted_step(self, computed: bool, restart: bool) -> None:
        super().interrupted_step(computed, restart)
        self.ledger.reset()
        self.advancing.clear()

    def check_batch(self, batch: Batch) -> None:
        """The step is launched: first the device ends the one before."""
        super().check_batch(batch)
        self.end_step()
        inputs = step_inputs(batch, self.block_size, self.ledger, [])
        self.words[inputs.changes.offsets] = inputs.changes.words
        if inputs.prefill is not None:
            self.begin_step(batch, inputs.prefill.sample_table_rows.tolist())
            return
        for seq in batch.seqs:
            self.check_row(seq)
        self.begin_step(batch, [*map(self.row_of, batch.seqs)])
        for seq, _, start, end in self.rows.missing:
            assert end <= min(self.most_drafted, len(self.computed[seq]) - 1)
            self.check_drafted_to(seq, start)
            numbers = self.numbered(seq)
            for place in range(start, end):
                self.drafted[self.slot(seq, place)] = numbers[place]
            self.num_caught_up += end - start
        for seq in batch.seqs if batch.num_drafts else ():
            self.check_drafted_to(seq, self.first_guessed(seq))

    def begin_step(self, batch: Batch, rows: list[int]) -> None:
        """The step's tokens will go to these rows."""
        for seq, row in zip(dict.fromkeys(batch.sampling_seqs), rows, strict=True):
            self.advancing.append((batch, seq, row, len(self.computed[seq])))

    def end_step(self) -> None:
        """The device leaves tokens in their rows, and what a decode step counts."""
        for batch, seq, row, before in self.advancing:
            added = len(self.computed[seq]) - before
            self.words[self.layout.tokens + 2 * row] = self.computed[seq][-1]
            self.words[self.layout.lengths + row] += 0 if batch.is_prefill else added
            if batch.num_drafts:
                self.words[self.layout.counts + row] = added
                self.recent[row] = self.computed[seq][before:]
        self.advancing.clear()

    def row_of(self, seq: Sequence) -> int:
        return self.ledger._rows[seq.seq_id]

    def check_row(self, seq: Sequence) -> None:
        """A decode step reads the sequence's last token, its length and its blocks."""
        layout, row = self.layout, self.row_of(seq)
        first = layout.block_tables + row * layout.max_blocks
        assert self.words[first : first + len(seq.block_table)].tolist() == seq.block_table
        assert self.words[layout.lengths + row] == len(self.computed[seq]) - 1
        assert self.words[layout.tokens + 2 * row] == self.computed[seq][-1]

    def first_guessed(self, seq: Sequence) -> int:
        """The first position that the draft model reads in the step itself."""
        row = self.row_of(seq)
        count = self.words[self.layout.counts + row]
        if count > 1:
            assert self.recent[row] == self.computed[seq][-count:]
        return len(self.computed[seq]) - 1 - int(count > 1)

    def check_drafted_to(self, seq: Sequence, end: int) -> None:
        """The draft model has computed the first `end` tokens, as far as their blocks are held."""
        numbers = self.numbered(seq)
        for place in range(seq.num_passed_blocks[0] * self.block_size, min(end, self.most_drafted)):
            assert self.drafted.get(self.slot(seq, place)) == numbers[place], (seq, place)

    def guess(self, seq: Sequence, slots: list[Slot], most: int) -> list[int]:
        """All of them, each computed to guess the next one."""
        drafts = self.rng.choices([0, 1], k=most)
        numbers, last = self.numbered(seq, drafts), len(self.computed[seq]) - 1
        for place in range(self.first_guessed(seq), last + min(len(slots), most)):
            self.drafted[self.slot(seq, place)] = numbers[place]
        return drafts


@pytest.mark.slow
def test_the_draft_model_has_computed_what_guesses_read() -> None:
    """After prefix hits, forks, preemptions, aborts and interrupts, with a window or without."""
    seeds = range(selection.NUMBER, selection.NUMBER + selection.examples(80))
    simulations = [walk(seed, make=DraftedSimulation) for seed in seeds]
    # The least of 92 samples of 27 walks are 80 and 1,407; a run has at least 20.
    assert sum(simulation.scheduler.num_preemptions for simulation in simulations) > 20
    assert sum(simulation.num_caught_up for simulation in simulations) > 300
