"""DeviceDrafting: what a rank's device does about drafts. The base class does nothing."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.engine.cache.groups import CacheGroups
from nanovllm.engine.cache.pools import KVPool
from nanovllm.engine.run.device_table import DeviceTable, TableLayout
from nanovllm.engine.run.step_inputs import StepInputs
from nanovllm.engine.run.step_part import StepPart
from nanovllm.engine.schedule.batch import Batch, Size
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.kernels.plain.read_table import TableState
from nanovllm.layers.context import Context
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM

if TYPE_CHECKING:
    from nanovllm.engine.run.rows_ahead import RowsAhead


class DeviceDrafting(StepPart):
    """Guesses drafts at the beginning of the step that verifies them, and writes them to the table.

    `guess` and `keep` are in decode graphs, so they wait for nothing. All ranks call the same
    methods in the same order, except the last ones, which are for rank 0.
    """

    reads_history = False  # whether the table needs all tokens of a row
    most_in_step = 0  # the most drafts of a step
    longest_window: int | None = 0  # how far back it attends; None for everything
    pools: tuple[KVPool, ...] = ()  # its KV, in blocks with the numbers of the model's
    models: tuple[tuple[ModelConfig, CausalLM], ...] = ()  # draft models

    def check(self, groups: CacheGroups) -> None:
        """Raise a ValueError if its pools cannot share the blocks of these groups."""

    def make_rows(self, num_rows: int) -> None:
        """Allocate what is kept for `num_rows` table rows."""

    def guess(self, table: TableState, size: Size) -> None:
        """Write drafts for the batch's rows, if the decode step has some."""

    def keep(self, table: TableState, size: Size, residuals: list[torch.Tensor]) -> None:
        """Keep what the model has computed of a decode step's queries [B * Q]."""

    def prefill(
        self,
        table: TableState,
        inputs: StepInputs,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: Context,
        residuals: list[torch.Tensor],
    ) -> None:
        """Keep what the model has computed of a prefill's tokens."""

    def catch_up(self, input_ids: torch.Tensor, positions: torch.Tensor, context: Context) -> None:
        """Compute tokens of steps in which it did nothing."""

    def warm_up_steps(
        self,
        inputs: StepInputs,  # noqa: ARG002
    ) -> list[StepInputs]:
        """Steps for `catch_up` with a prefill's tokens, to be run before requests come."""
        return []

    def measure(self, shard: Any) -> None:
        """Measure the decode graphs of this rank's shard, if that decides about drafts."""

    def rows_ahead(self, layout: TableLayout) -> "RowsAhead | None":  # noqa: ARG002
        """What the ledger of a table records for drafts; None if the device guesses none."""
        return None

    def steps(self, inputs: StepInputs, budget: int) -> list[StepInputs]:  # noqa: ARG002
        """The step, and before it steps of up to `budget` tokens in which `catch_up` is called."""
        return [inputs]

    def known_drafts(
        self,
        batch: Batch,
        table: DeviceTable,  # noqa: ARG002
    ) -> Mapping[Sequence, list[int]]:
        """The drafts that a step's draws depend on."""
        return batch.drafts
