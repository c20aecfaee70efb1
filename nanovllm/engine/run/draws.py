"""Draws: draws the tokens of steps, and stores them in the device table. On rank 0."""

from typing import TYPE_CHECKING

import torch

from nanovllm.engine.run.computed import Computed
from nanovllm.engine.run.device_table import DeviceTable
from nanovllm.engine.run.draw_inputs import DrawInputs
from nanovllm.engine.run.transfer import upload, upload_all
from nanovllm.kernels.table import Kernels
from nanovllm.layers.sampler import Sampler

if TYPE_CHECKING:
    from nanovllm.engine.run.redraws import Redraws
    from nanovllm.engine.run.reports import Columns

Choices = tuple[torch.Tensor | None, torch.Tensor | None]  # temperatures and keys


class Draws:
    """Draws from the logits [B, V] of a step's samples, where V is `vocab_size`."""

    def __init__(
        self, table: DeviceTable, kernels: Kernels, device: torch.device, vocab_size: int
    ) -> None:
        self.sampler = Sampler(kernels)
        self._table, self._kernels = table, kernels
        self._device, self._vocab_size = device, vocab_size

    def draw(
        self, computed: Computed, inputs: DrawInputs, redraws: "Redraws | None" = None
    ) -> "tuple[torch.Tensor, tuple[Columns, ...]]":
        """The token ids of a step's samples, and their reports.

        If each sequence has several queries, the first are what `accept` returns. `redraws` belong
        to the decode graph that has computed the step.
        """
        if not inputs.num_samples:
            return torch.empty(0, dtype=torch.long, device=self._device), ()
        if computed.token_ids is not None and not inputs.filters and inputs.report is None:
            return computed.results(inputs.num_samples), ()
        if inputs.filters or inputs.report is not None:
            assert computed.logits.shape[1] == self._vocab_size, "a part of the vocabulary"
        if redraws is not None and redraws.takes(inputs.filters):
            computed = redraws(computed, inputs.filters)
        else:
            computed = self._draw(computed.first(inputs.num_samples), inputs)
        columns: tuple[Columns, ...] = ()
        if inputs.report is not None:
            from nanovllm.engine.run.logprobs import drawn_columns

            columns = drawn_columns(computed, inputs, self._kernels)
        return computed.results(inputs.num_samples), columns

    def _draw(self, computed: Computed, inputs: DrawInputs) -> Computed:
        """Draw the tokens that are not drawn yet, or that filters narrow."""
        if computed.token_ids is not None and not inputs.filters:
            return computed
        choices = self._choices(computed, inputs)
        filters = upload_all(inputs.filters, self._device) if inputs.filters else []
        return self.keep(
            computed, self.sampler(computed.logits, *choices, filters, computed.token_ids)
        )

    def keep(self, computed: Computed, token_ids: torch.Tensor) -> Computed:
        """Store the drawn tokens in the table, and the accepted ones in `computed`."""
        if computed.decoding is None:
            self._table.keep_tokens(computed.table_rows, token_ids)
            return computed._replace(token_ids=token_ids)
        accept, queries = self._kernels.accept, computed.num_queries
        outcome = accept(self._table.columns, computed.decoding, token_ids, queries)
        return computed._replace(token_ids=token_ids, outcome=outcome)

    def _choices(self, computed: Computed, inputs: DrawInputs) -> Choices:
        """Temperatures and keys on the device; None if all rows are greedy."""
        if inputs.is_greedy:
            return None, None
        if computed.choices is not None:
            return computed.choices
        assert inputs.temperatures is not None and inputs.keys is not None
        return upload(inputs.temperatures, self._device), upload(inputs.keys, self._device)
