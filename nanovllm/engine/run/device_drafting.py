"""DeviceDrafting: makes drafts on a rank's device. The base class makes none."""

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

    `guess` and `keep` are captured in decode graphs, so they never wait for the device. All ranks
    call the same methods in the same order, except `rows_ahead` and the later ones, for rank 0.
    """

    reads_history = False  # whether the table needs all tokens of a row
    most_in_step = 0  # the most drafts of a step
    longest_window: int | None = 0  # how far back the drafting attends; None for all tokens
    pools: tuple[KVPool, ...] = ()  # of its KV, with the block numbers of the model's pool
    models: tuple[tuple[ModelConfig, CausalLM], ...] = ()  # draft models

    def check(self, groups: CacheGroups) -> None:
        """Raise a ValueError if its pools cannot have the block numbers of these groups."""

    def make_rows(self, num_rows: int) -> None:
        """Allocate the state of `num_rows` table rows."""

    def guess(self, table: TableState, size: Size) -> None:
        """Write drafts to the batch's rows, if the decode step has drafts."""

    def keep(self, table: TableState, size: Size, residuals: list[torch.Tensor]) -> None:
        """Keep for later drafts what the model has computed for a decode step's queries [B * Q]."""

    def prefill(
        self,
        table: TableState,
        inputs: StepInputs,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: Context,
        residuals: list[torch.Tensor],
    ) -> None:
        """Keep for later drafts what the model has computed for a prefill's tokens."""

    def catch_up(self, input_ids: torch.Tensor, positions: torch.Tensor, context: Context) -> None:
        """Compute tokens of earlier steps, which the draft model has not seen."""

    def warm_up_steps(
        self,
        inputs: StepInputs,  # noqa: ARG002
    ) -> list[StepInputs]:
        """Steps for `catch_up` with a prefill's tokens, to be run before requests come."""
        return []

    def measure(self, shard: Any) -> None:
        """Time this rank's decode graphs, if the number of drafts depends on that."""

    def rows_ahead(self, layout: TableLayout) -> "RowsAhead | None":  # noqa: ARG002
        """What the ledger of a table records for drafts; None if the device guesses none."""
        return None

    def steps(self, inputs: StepInputs, budget: int) -> list[StepInputs]:  # noqa: ARG002
        """The step, after the steps of up to `budget` tokens that `catch_up` must compute first."""
        return [inputs]

    def known_drafts(
        self,
        batch: Batch,
        table: DeviceTable,  # noqa: ARG002
    ) -> Mapping[Sequence, list[int]]:
        """The drafts that a step's draws depend on."""
        return batch.drafts
