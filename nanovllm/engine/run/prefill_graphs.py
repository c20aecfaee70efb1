"""Prefills of few tokens captured as CUDA graphs, once for each of a ladder of sizes.

Short prompts are computed in less time than it takes to launch their kernels one by one. A graph
has the embedding, the blocks and the last norm; the head and the draw are launched behind it.
Without CUDA, replaying a size calls the model, so that everything except the capture runs, and is
tested, anywhere.
"""

import functools
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.engine.run.device_table import BUFFERS, DeviceTable
from nanovllm.engine.run.forward import Forward, contexts_of
from nanovllm.engine.run.graphed_shard import GraphedShard
from nanovllm.engine.run.graphs import Capture, DecodeGraphs, decode_graphs
from nanovllm.engine.run.padded import PaddedPart, PrefillSize, aligned
from nanovllm.engine.run.step_inputs import PrefillInputs, StepInputs
from nanovllm.engine.run.step_part import StepPart
from nanovllm.engine.run.transfer import Array, upload_ahead
from nanovllm.layers.context import Context

# From 32 on, at most a third of a step's tokens are padding, and half of them with marks.
TOKENS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
CROWDED = (128, 256, 384, 512, 768, 1024)  # also captured for steps of mostly decoding sequences


def sizes_up_to(
    num_running: int, num_tokens: int = TOKENS[-1], has_marks: bool = False
) -> list[PrefillSize]:
    """The sizes to capture for up to `num_running` sequences and `num_tokens` in a step.

    A quarter of the tokens may be sequences of their own, such as decoding ones, and in some sizes
    without marks all. Only some steps have marks: they have fewer sizes.
    """
    smaller = (0, *TOKENS)
    used = [tokens for tokens, less in zip(TOKENS, smaller, strict=False) if less < num_tokens]
    # With more than eight sequences, Hopper's kernel, which writes no padding, takes longer steps.
    few = {tokens: max(8, min(num_running, tokens // 4)) for tokens in used}
    many = {tokens: max(8, min(num_running, tokens)) for tokens in CROWDED if tokens in few}
    pairs = {*few.items(), *many.items()}
    sizes = [PrefillSize(tokens, 1 + seqs) for tokens, seqs in sorted(pairs)]
    odd = {*used[1::2], used[-1]}
    marked = [PrefillSize(tokens, 1 + few[tokens], is_marked=True) for tokens in sorted(odd)]
    return sizes + marked if has_marks else sizes


class PaddedArrays(NamedTuple):
    """The arrays of a prefill of T tokens in fewer than S sequences, which the layers read."""

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    slots: torch.Tensor  # [groups, T]; -1 for padding
    table_rows: torch.Tensor  # [S]
    needed: torch.Tensor  # [S]: the tokens whose hidden states are computed to the end
    q_ends: torch.Tensor  # [S + 1], int32
    k_ends: torch.Tensor  # [S + 1], int32

    @classmethod
    def of(cls, memory: torch.Tensor, size: PrefillSize, num_groups: int) -> "PaddedArrays":
        """The parts of a memory of `lengths_of(size, num_groups)` words."""
        seqs = size.num_seqs
        ids, positions, slots, *of_seqs = torch.split(memory, lengths_of(size, num_groups))
        rows, needed = (part[:seqs] for part in of_seqs[:2])
        q_ends, k_ends = (part.view(torch.int32)[: seqs + 1] for part in of_seqs[2:])
        return cls(ids, positions, slots.view(num_groups, -1), rows, needed, q_ends, k_ends)

    def fill(self, prefill: PrefillInputs, needed: Array, unused_row: int) -> None:
        """Write a step's arrays and their padding. On the host."""
        num_tokens = len(prefill.input_ids)
        values = (
            (prefill.input_ids, 0), (prefill.positions, 0),
            (prefill.slot_mapping.reshape(-1, num_tokens), -1),
            (prefill.table_rows, unused_row), (needed, 0),
            (prefill.cu_seqlens_q, num_tokens), (prefill.cu_seqlens_k, prefill.cu_seqlens_k[-1]),
        )  # fmt: skip
        for tensor, (array, padding) in zip(self, values, strict=True):
            whole: Array = tensor.numpy()
            whole[..., : array.shape[-1]] = array
            whole[..., array.shape[-1] :] = padding


def lengths_of(size: PrefillSize, num_groups: int) -> list[int]:
    """The 64-bit words of each of a size's arrays."""
    tokens, seqs, _ = size
    ends = aligned(seqs // 2 + 1)
    return [tokens, tokens, num_groups * tokens, aligned(seqs), aligned(seqs), ends, ends]


class PaddedStep:
    """The memory of a size: its arrays and those of step parts, on the host and on the device.

    There are several copies on the host, as steps may not have been uploaded yet.
    """

    def __init__(
        self, size: PrefillSize, num_groups: int, parts: Sequence[StepPart], device: torch.device
    ) -> None:
        padded = {part.name: part.padded(size) for part in parts}
        self.parts = {name: part for name, part in padded.items() if part is not None}
        others = (aligned(part.words) for part in self.parts.values())
        lengths = [sum(lengths_of(size, num_groups)), *others]

        def allocate(
            device: torch.device, pin_memory: bool
        ) -> tuple[torch.Tensor, PaddedArrays, list[torch.Tensor]]:
            memory = torch.zeros(
                sum(lengths), dtype=torch.long, device=device, pin_memory=pin_memory
            )
            own, *others = torch.split(memory, lengths)
            return memory, PaddedArrays.of(own, size, num_groups), others

        pinned = device.type == "cuda"
        self._hosts = cycle([allocate(torch.device("cpu"), pinned) for _ in range(BUFFERS)])
        self._memory, self.arrays, self._others = allocate(device, pin_memory=False)
        self.arrays.slots.fill_(-1)

    def upload(self, inputs: StepInputs, needed: Array, unused_row: int) -> bool:
        """Send a step's arrays to the device, in the order of the device's work.

        False if those of a part have no room: nothing is sent.
        """
        assert inputs.prefill is not None
        fillers = [fill for part in self.parts.values() if (fill := part.filler(inputs))]
        if len(fillers) < len(self.parts):
            return False
        memory, arrays, others = next(self._hosts)
        arrays.fill(inputs.prefill, needed, unused_row)
        for fill, words in zip(fillers, others, strict=True):
            fill(words.numpy())
        self._memory.copy_(memory, non_blocking=True)
        return True

    def read(self) -> dict[str, object]:
        """The values that layers read of step parts, by their names."""
        parts: Iterable[tuple[str, PaddedPart]] = self.parts.items()
        values = zip(parts, self._others, strict=True)
        return {name: part.read(words) for (name, part), words in values}


class ShortPrefill(NamedTuple):
    """What a graph has computed of a prefill's T tokens. The next replay overwrites it."""

    hidden: torch.Tensor  # of the needed tokens
    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    context: Context  # of the first cache group
    residuals: list[torch.Tensor]  # [T, hidden] each


class PrefillGraphs:
    """The model for every size. A prefill runs in the next larger one, padded.

    Padding is stored nowhere, and belongs to no sequence. The attention backend must write zeros to
    its rows: other layers compute them as any row, and no row depends on others. `parts` are those
    that layers read in a prefill.
    """

    def __init__(
        self, forward: Forward, table: DeviceTable, num_groups: int, parts: Sequence[StepPart],
        sizes: list[PrefillSize],
    ) -> None:  # fmt: skip
        self.forward, self.table, self.num_groups, self.sizes = forward, table, num_groups, sizes
        self.graphs: dict[PrefillSize, tuple[torch.cuda.CUDAGraph, ShortPrefill]] = {}
        self._device = table.block_tables.device
        self._steps = {size: PaddedStep(size, num_groups, parts, self._device) for size in sizes}

    def capture(self, capture: Capture, one_in: int = 1) -> None:
        """Capture one in `one_in` sizes: those with marks first, and largest first."""
        for size in self.sizes[::-one_in]:
            self.graphs[size] = capture(functools.partial(self.run, size))

    def release(self) -> None:
        """Free the captured graphs, even if this object is still referenced."""
        for graph, _ in self.graphs.values():
            graph.reset()
        self.graphs.clear()

    def fitting(
        self, num_tokens: int, num_seqs: int, num_needed: int, is_marked: bool = False
    ) -> PrefillSize | None:
        """The smallest size for so many tokens, sequences and hidden states, if there is one.

        Large layers are bound by arithmetic: more padding than between two sizes costs more than
        the launches, except with marks, which have half of the sizes. A step of mostly decoding
        sequences with marks has none.
        """
        most = max(num_seqs + 1, num_needed)
        largest = (2 if is_marked else 1.5) * num_tokens + 32
        fitting = (
            size for size in self.sizes
            if num_tokens <= size.num_tokens <= largest and most <= size.num_seqs
            and is_marked == size.is_marked
        )  # fmt: skip
        return next(fitting, None)

    def compute(self, inputs: StepInputs) -> ShortPrefill | None:
        """Compute a prefill, with the hidden states of its sampled tokens; None if none fits."""
        prefill = inputs.prefill
        assert prefill is not None
        needed = prefill.sampled_tokens
        num_tokens, num_seqs = len(prefill.input_ids), len(prefill.table_rows)
        size = self.fitting(num_tokens, num_seqs, len(needed), inputs.is_marked)
        if size is None:
            return None
        step = self._steps[size]
        if not step.upload(inputs, needed, self.table.layout.unused_row):
            return None
        pending = prefill.pending()
        if len(pending[0]):
            self.table.share()
            ids = step.arrays.input_ids
            ids.copy_(self.table.fill_pending(ids, *upload_ahead(self._device, *pending)))
        if size in self.graphs:
            graph, computed = self.graphs[size]
            graph.replay()
        else:
            computed = self.run(size)
        return _without_padding(computed, prefill, len(needed))

    def run(self, size: PrefillSize) -> ShortPrefill:
        """Compute a size's arrays."""
        step = self._steps[size]
        ids, positions, slots, rows, needed, q_ends, k_ends = step.arrays
        tables: list[torch.Tensor | None] = [
            table.index_select(0, rows) for table in self.table.block_tables[: self.num_groups]
        ]
        context = Context(
            is_prefill=True,
            slot_mapping=slots[0],
            cu_seqlens_q=q_ends,
            cu_seqlens_k=k_ends,
            max_seqlen_q=size.num_tokens,
            max_seqlen_k=self.table.layout.max_blocks * self.table.layout.block_size,
            block_tables=tables[0],
        )
        contexts = contexts_of(context, slots[1:], tables[1:])
        hidden, residuals = self.forward(ids, positions, contexts, step.read(), needed)
        return ShortPrefill(hidden, ids, positions, context, residuals)


def _without_padding(
    computed: ShortPrefill, prefill: PrefillInputs, num_needed: int
) -> ShortPrefill:
    """A prefill's own rows of what its size has computed."""
    hidden, ids, positions, context, residuals = computed
    num_tokens, num_seqs = len(prefill.input_ids), len(prefill.table_rows)
    assert context.cu_seqlens_q is not None and context.cu_seqlens_k is not None
    assert context.block_tables is not None
    own = Context(
        is_prefill=True,
        slot_mapping=context.slot_mapping[:num_tokens],
        cu_seqlens_q=context.cu_seqlens_q[: num_seqs + 1],
        cu_seqlens_k=context.cu_seqlens_k[: num_seqs + 1],
        max_seqlen_q=int(np.diff(prefill.cu_seqlens_q).max()),
        max_seqlen_k=int(np.diff(prefill.cu_seqlens_k).max()),
        block_tables=context.block_tables[:num_seqs],
    )
    return ShortPrefill(
        hidden[:num_needed], ids[:num_tokens], positions[:num_tokens], own,
        [residual[:num_tokens] for residual in residuals],
    )  # fmt: skip


def prefill_graphs(
    shard: GraphedShard, num_running: int, num_tokens: int = TOKENS[-1]
) -> PrefillGraphs | None:
    """Short prefills of a shard in all sizes, not captured; they run on any device.

    None if attention or a part that layers read cannot compute padding, if no layer attends, or if
    ranks exchange results.
    """
    groups, base = shard.caches.groups.groups, StepPart
    parts = [part for part in shard.parts if type(part).in_prefill is not base.in_prefill]
    pads = all(type(part).padded is not base.padded for part in parts)
    if not pads or not all(group.attention.clears_rows for group in groups):
        return None
    if not groups or shard.placement.ranks.size > 1:
        return None
    sizes = sizes_up_to(num_running, num_tokens, shard.marking is not None)
    return PrefillGraphs(shard.forward, shard.table, len(groups), parts, sizes)


def captured_graphs(
    shard: GraphedShard, num_running: int, num_tokens: int, one_in: int = 1
) -> tuple[DecodeGraphs, PrefillGraphs | None]:
    """Capture a shard's decode steps and short prefills: one in `one_in` sizes of each."""
    capture = Capture(shard.placement.device, shard.are_loaded)
    decodes = decode_graphs(shard, num_running)
    prefills = prefill_graphs(shard, num_running, num_tokens)
    decodes.capture(capture, one_in)
    if prefills is not None:
        prefills.capture(capture, one_in)
    return decodes, prefills
