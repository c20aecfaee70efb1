"""Prefills: computes the prefills of one rank."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanovllm.engine.run.computed import Computed
from nanovllm.engine.run.device_drafting import DeviceDrafting
from nanovllm.engine.run.device_table import DeviceTable
from nanovllm.engine.run.forward import Forward, contexts_of
from nanovllm.engine.run.step_inputs import StepInputs
from nanovllm.engine.run.step_part import StepPart
from nanovllm.engine.run.transfer import Array, upload, upload_ahead
from nanovllm.layers.context import Context

if TYPE_CHECKING:
    from nanovllm.engine.run.prefill_graphs import PrefillGraphs


class Prefills:
    """Computes prompts or parts of them, with the tokens of decoding sequences in the same step.

    `copy_block` copies a block of KV to another one.
    """

    def __init__(
        self,
        forward: Forward,
        table: DeviceTable,
        parts: Sequence[StepPart],
        drafting: DeviceDrafting,
        device: torch.device,
        copy_block: Callable[[int, int], None],
    ) -> None:
        self.forward, self.table, self.parts = forward, table, parts
        self.drafting, self.device, self._copy_block = drafting, device, copy_block

    def compute(self, inputs: StepInputs, graphs: "PrefillGraphs | None" = None) -> Computed:
        """Compute a prefill, by a graph if one fits. Its tokens are not drawn yet."""
        prefill = inputs.prefill
        assert prefill is not None
        takers = [
            (part, tokens) for part in self.parts if (tokens := part.tokens(inputs)) is not None
        ]
        if takers:
            needed = np.concatenate([*(tokens for _, tokens in takers), prefill.sampled_tokens])
            hidden = self.hidden(inputs, needed)
        elif graphs is None or inputs.keeps_hidden or not (done := graphs.compute(inputs)):
            hidden = self.hidden(inputs, prefill.sampled_tokens)
        else:
            hidden = done.hidden
            self.drafting.prefill(self.table.columns, inputs, *done[1:])
        if prefill.copied_blocks is not None:
            for source, target in prefill.copied_blocks.reshape(-1, 2).tolist():
                self._copy_block(source, target)

        def compute_logits(hidden: torch.Tensor, tokens: Array) -> torch.Tensor:
            return self.forward.logits(hidden, self._read(inputs, tokens))

        taken: dict[str, Any] = {}
        for part, tokens in takers:
            rows, hidden = hidden[: len(tokens)], hidden[len(tokens) :]
            taken[part.name] = part.take(rows, inputs, compute_logits)
        if prefill.shared_samples is not None:
            hidden = hidden.index_select(0, upload(prefill.shared_samples, self.device))
        logits = hidden
        if len(hidden):
            logits = compute_logits(hidden, prefill.tokens_of_samples())
            self.table.draws_alone()
        rows, kept = upload(prefill.sample_table_rows, self.device), inputs.keeps_hidden
        return Computed(logits, rows, taken=taken, hidden=hidden if kept else None)

    def hidden(self, inputs: StepInputs, needed: Array | None = None) -> torch.Tensor:
        """The hidden states of a prefill's tokens, or only of those `needed`."""
        input_ids, positions, contexts = self._upload(inputs)
        rows = None if needed is None else upload_ahead(self.device, needed)[0]
        read = self._read(inputs)
        hidden, residuals = self.forward(input_ids, positions, contexts, read, rows)
        self.drafting.prefill(
            self.table.columns, inputs, input_ids, positions, contexts[0], residuals
        )
        return hidden

    def catch_up(self, inputs: StepInputs) -> None:
        """Let the device's drafting compute these tokens, which all ranks know."""
        input_ids, positions, contexts = self._upload(inputs)
        self.drafting.catch_up(input_ids, positions, contexts[0])

    def _read(self, inputs: StepInputs, tokens: Array | None = None) -> dict[str, Any]:
        """The values that layers read of step parts; with `tokens`, those for the head."""
        return {
            part.name: value
            for part in self.parts
            if (value := part.in_prefill(inputs, tokens)) is not None
        }

    def _upload(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor, list[Context]]:
        """A prefill's tokens, their positions and each cache group's metadata on the device."""
        prefill, width = inputs.prefill, inputs.width
        assert prefill is not None
        input_ids, positions, slots, q_ends, k_ends = upload_ahead(
            self.device, prefill.input_ids, prefill.positions, prefill.slot_mapping,
            prefill.cu_seqlens_q, prefill.cu_seqlens_k,
        )  # fmt: skip
        pending = prefill.pending()
        if len(pending[0]):
            self.table.share()
            input_ids = self.table.fill_pending(input_ids, *upload_ahead(self.device, *pending))
        groups = slots.view(-1, len(input_ids)) if len(slots) else slots[None]
        tables: list[torch.Tensor | None] = [None] * len(groups)
        if width or self.forward.reads_cache:
            (table_rows,) = upload_ahead(self.device, prefill.table_rows)
            tables = [
                table[:, : width or None].index_select(0, table_rows)
                for table in self.table.block_tables[: len(groups)]
            ]
        ends = prefill.cu_seqlens_q, prefill.cu_seqlens_k
        queries, keys = (int(np.diff(each).max()) for each in ends)
        context = Context(True, groups[0], q_ends, k_ends, queries, keys, block_tables=tables[0])
        return input_ids, positions, contexts_of(context, groups[1:], tables[1:])
