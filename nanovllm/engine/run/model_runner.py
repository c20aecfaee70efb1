"""ModelRunner: rank 0's driver. It turns scheduled batches into token ids, on all ranks.

Rank 0's shard computes the same steps as the other ranks, which `OtherRanks` represents.
"""

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.run.computed import REPORTED
from nanovllm.engine.run.draw_inputs import draw_inputs, needs_logits
from nanovllm.engine.run.launched import Begun, Launched
from nanovllm.engine.run.ledger import Ledger
from nanovllm.engine.run.other_ranks import Command, OtherRanks
from nanovllm.engine.run.shard import Shard
from nanovllm.engine.run.step_inputs import StepInputs, step_inputs
from nanovllm.engine.run.step_part import TAKEN, PromptReports
from nanovllm.engine.schedule.batch import Batch

if TYPE_CHECKING:
    from nanovllm.engine.run.hidden_reader import HiddenReader
    from nanovllm.engine.run.reports import Report


class ModelRunner:
    """Drives the started shard, and the workers: the other ranks, if there are any.

    They belong to the process `owner`. A forked process has copies of handles, and must not use
    them.
    """

    def __init__(self, shard: Shard, config: EngineConfig, workers: OtherRanks) -> None:
        self.owner = os.getpid()
        self.shard = shard
        self.config = config
        self.workers = workers
        layout, marking = shard.table.layout, shard.marking
        ahead = shard.drafting.rows_ahead(layout)
        self.ledger = Ledger(layout, ahead, None if marking is None else marking.mark_of)
        self.hidden_reader: HiddenReader | None = None  # from `read_hidden` on

    def read_hidden(self, reader: "HiddenReader") -> None:
        """Let this reader take hidden states from steps from now on."""
        self.hidden_reader = reader

    def begin(self, batch: Batch) -> Begun:
        """Begin to compute a step. On a GPU with Triton's kernels it waits for nothing.

        Input tokens that are still in flight are read from the device table.
        """
        shard, seqs = self.shard, batch.sampling_seqs
        whole = shard.ranks.size == 1 or needs_logits(seqs)
        step = step_inputs(batch, shard.block_size, self.ledger, whole)
        shard.add_arrays(step, batch)
        asked = [] if self.hidden_reader is None else self._ask(self.hidden_reader, step, batch)
        *before, inputs = shard.drafting.steps(step, self.config.max_num_batched_tokens)
        for catch_up in before:
            with self.workers.step(catch_up), shard.computing():
                shard.catch_up(catch_up)
        with self.workers.step(inputs), shard.computing():
            num_tokens = sum(seq.num_scheduled_tokens for seq in batch.seqs)
            prompts: list[Report] = []
            if REPORTED in inputs.arrays:
                from nanovllm.engine.run.reports import prompt_reports

                prompts = prompt_reports(batch.seqs)
            return Begun(batch, num_tokens, shard.compute(inputs), prompts, asked)

    def _ask(self, reader: "HiddenReader", step: StepInputs, batch: Batch) -> list[Any]:
        """Let a step keep the hidden states that the reader asks for. Returns what was asked."""
        step.keeps_hidden = reader.keeps_drawn(batch.sampling_seqs)
        if step.prefill is None or not (asked := reader.asked(batch)):
            return []
        step.arrays[TAKEN] = reader.tokens(batch, asked, step.prefill.cu_seqlens_q)
        return asked

    def draw(self, begun: Begun) -> Launched:
        """Draw a step's tokens. The draw's inputs are made while the device computes the logits.

        If a sequence's draw reads its tokens, none of them may be in flight.
        """
        (batch, _, computed, prompts, asked), shard = begun, self.shard
        reader, keep = self.hidden_reader, None
        seqs, offsets = batch.sampling_seqs, batch.offsets
        with shard.computing():
            kind, vocab_size = shard.device.type, shard.model_config.vocab_size
            drafts = shard.drafting.known_drafts(batch, shard.table)
            draws = draw_inputs(seqs, vocab_size, kind, computed, offsets, drafts)
            token_ids, columns = shard.draw(computed, draws)
            reports = prompts
            if draws.report is not None:
                from nanovllm.engine.run.reports import drawn_reports

                reports = [*prompts, *drawn_reports(seqs, offsets, draws.report)]
            if reader is not None:
                keep = reader.launch(asked, seqs, offsets, computed)
            columns = (*computed.taken.get(PromptReports.name, ()), *columns)
            return Launched(begun, token_ids, reports, columns, keep)

    def wait(self, launched: Launched) -> list[int]:
        """Wait for a step's tokens. Raises RankError if a rank has ended."""
        with self.workers.waiting():
            launched.synchronize()
        return launched.wait()

    def everywhere(self, command: Command) -> list[Any]:
        """Run a command on every rank, after the steps begun so far; rank 0's result first.

        It waits for all ranks. What a rank raises is raised here.
        """
        return self.workers.everywhere(command, self.shard)

    def recover(self) -> None:
        """Start over after an interrupt: the device table's rows are written again.

        It waits for the device, which may still write to blocks that later steps reuse.
        """
        if self.failure is None:
            with suppress(RuntimeError):  # of a device that has failed: the next step raises it
                self.shard.synchronize()
        self.ledger.reset()

    @property
    def failure(self) -> str | None:
        """Why this runner cannot go on, if a rank has ended."""
        return self.workers.failure

    def check(self) -> None:
        """Raise RankError if a rank has ended."""
        self.workers.check()

    def close(self) -> None:
        """Free the device's memory and end the other ranks; the runner cannot be used again.

        In a forked process it does nothing.
        """
        if os.getpid() == self.owner:
            close_ranks(self.shard, self.workers)


def close_ranks(shard: Shard | None, workers: OtherRanks) -> None:
    """Free rank 0's shard, if there is one, and end the other ranks, even if the device failed."""
    try:
        if shard is not None:
            shard.close(device_works=workers.failure is None)
    finally:
        workers.close()
    if shard is not None:
        shard.return_memory()
