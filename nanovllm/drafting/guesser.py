"""Guesser: makes drafts on the device, at the beginning of the step that verifies them."""

from collections.abc import Mapping
from dataclasses import dataclass

from nanovllm.config import Config
from nanovllm.drafting.catch_up import drafts_read_by_draws, with_catch_ups
from nanovllm.drafting.step_sizes import MOST_DRAFTS, draft_sizes
from nanovllm.drafting.step_times import StepTimes, time_catch_up, time_graphs
from nanovllm.drafting.table_rows import TableRows
from nanovllm.engine.run.device_drafting import DeviceDrafting
from nanovllm.engine.run.device_table import DeviceTable, TableLayout
from nanovllm.engine.run.shard import Shard
from nanovllm.engine.run.step_inputs import StepInputs
from nanovllm.engine.schedule.batch import Batch, Size
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.engine.start.placement import Placement
from nanovllm.kernels.plain.read_table import TableState
from nanovllm.kernels.table import Kernels
from nanovllm.models.decoder import CausalLM


class Guesser(DeviceDrafting):
    """The common part of all guessers: rank 0 sends tokens that they have not seen; steps are
    timed.

    `longest` is the most tokens of a sequence that the guesser computes when it catches up.
    """

    label = "guesser"  # in messages
    longest: int | None = None
    most_in_step = MOST_DRAFTS
    num_bytes = 0.0  # the weights that a draft reads, on all ranks together
    times = StepTimes()
    _rows: TableRows | None = None  # on rank 0

    def sizes(self, placement: Placement, largest: int, others: list[Size]) -> list[Size]:
        """Decode steps with drafts for up to `largest` sequences."""
        del others
        return draft_sizes(placement.most_drafts, largest)

    def measure(self, shard: Shard) -> None:
        """Time the decode graphs, and catching up. All ranks do it at the same time."""
        self.times = StepTimes(time_graphs(shard), time_catch_up(shard, self.longest))

    def rows_ahead(self, layout: TableLayout) -> TableRows:
        """The records for drafts that the ledger of a table keeps."""
        self._rows = TableRows(layout, self.longest)
        return self._rows

    def steps(self, inputs: StepInputs, budget: int) -> list[StepInputs]:
        """The step, and before it steps in which a draft model computes missing tokens."""
        if self._rows is None or not self._rows.missing:
            return [inputs]
        missing, self._rows.missing = self._rows.missing, []
        return with_catch_ups(inputs, missing, self._rows.block_size, budget)

    def known_drafts(self, batch: Batch, table: DeviceTable) -> Mapping[Sequence, list[int]]:
        """The drafts that a step's draws depend on. Waits for the device if there are some."""
        return drafts_read_by_draws(batch, table)


class NgramGuesser(Guesser):
    """Guesses the tokens that followed an earlier occurrence of a row's last tokens."""

    label = "n-grams"
    reads_history = True

    def __init__(self, kernels: Kernels, shortest: int, longest: int) -> None:
        self._kernels = kernels
        self._shortest, self._longest = shortest, longest

    def guess(self, table: TableState, size: Size) -> None:
        """Write drafts for the batch's rows, if the decode step has drafts."""
        if size.num_queries > 1:
            self._kernels.guess_ngrams(
                table, size.num_seqs, size.num_queries - 1, self._shortest, self._longest
            )


@dataclass(frozen=True)
class NgramSource:
    """Makes guessers of n-grams of these lengths; there is nothing to load."""

    shortest: int
    longest: int

    def load(self, config: Config, model: CausalLM, placement: Placement) -> DeviceDrafting:
        """The guesser; None if the host guesses n-grams."""
        del config, model
        if not placement.most_drafts:
            return DeviceDrafting()
        return NgramGuesser(placement.backend.kernels, self.shortest, self.longest)
