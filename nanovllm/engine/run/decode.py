"""Decodes: computes the decode steps of one rank, from the values in the device table."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from nanovllm.engine.run.computed import Computed
from nanovllm.engine.run.device_drafting import DeviceDrafting
from nanovllm.engine.run.device_table import DeviceTable
from nanovllm.engine.run.forward import Forward, contexts_of
from nanovllm.engine.run.step_inputs import StepInputs
from nanovllm.engine.run.step_part import StepPart
from nanovllm.engine.schedule.batch import Size
from nanovllm.kernels.plain.read_table import Decoding
from nanovllm.kernels.table import Kernels
from nanovllm.layers.context import Context


class Decoded(NamedTuple):
    """The hidden states of a decode step, the values read from the table and those for the head."""

    hidden: torch.Tensor
    decoding: Decoding
    read: dict[str, Any]


class Decodes:
    """Computes the first sequences of the table's batch: the last token of each, and its drafts."""

    def __init__(
        self,
        forward: Forward,
        table: DeviceTable,
        parts: Sequence[StepPart],
        drafting: DeviceDrafting,
        kernels: Kernels,
    ) -> None:
        self.forward, self.table, self.parts, self.drafting = forward, table, parts, drafting
        self._kernels = kernels

    def compute(self, inputs: StepInputs, size: Size) -> Computed:
        """Compute a decode step of this size kernel by kernel. Its tokens are not drawn yet."""
        self.table.draws_alone()
        hidden, decoding, read = self.decode(size, inputs.width)
        computed = not_drawn(size, decoding, self.forward.logits(hidden, read))
        return computed._replace(hidden=hidden) if inputs.keeps_hidden else computed

    def decode(self, size: Size, width: int) -> Decoded:
        """Compute hidden states, with block tables of `width` columns."""
        table, block_size = self.table, self.table.layout.block_size
        self.drafting.guess(table.columns, size)
        decoding = self._kernels.read_table(
            table.columns, size.num_seqs, width, block_size, size.num_queries
        )
        read = {
            part.name: value
            for part in self.parts
            if (value := part.in_decode(table, size, decoding)) is not None
        }
        context = Context(
            is_prefill=False,
            slot_mapping=decoding.slot_mapping,
            context_lens=decoding.context_lens,
            block_tables=decoding.block_tables,
            num_queries=size.num_queries,
        )
        contexts = [context]
        if len(table.layout.block_parts) > 1:
            from nanovllm.kernels.plain.read_groups import read_groups

            more = read_groups(table.columns, table.block_tables[1:], decoding, block_size)
            contexts = contexts_of(context, *more)
        hidden, residuals = self.forward(decoding.input_ids, decoding.positions, contexts, read)
        self.drafting.keep(table.columns, size, residuals)
        return Decoded(hidden, decoding, read)


def not_drawn(size: Size, decoding: Decoding, logits: torch.Tensor) -> Computed:
    """The `Computed` of a decode step before its tokens are drawn."""
    choices, queries = (decoding.temperatures, decoding.keys), size.num_queries
    drafted = decoding if queries > 1 else None
    return Computed(logits, decoding.rows, choices, num_queries=queries, decoding=drafted)
