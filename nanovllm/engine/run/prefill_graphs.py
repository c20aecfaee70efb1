"""Prefills of few tokens captured as CUDA graphs, once for each of a ladder of sizes.

Short prompts are computed in less time than it takes to launch their kernels one by one. A graph
has the embedding, the blocks and the last norm; the head and the draw are launched behind it.
Without CUDA, replaying a size calls the model, so that everything except the capture runs, and is
tested, anywhere.
"""

import functools
from itertools import cycle
from typing import NamedTuple

import torch

from nanovllm.engine.run.device_table import BUFFERS, DeviceTable
from nanovllm.engine.run.forward import Forward, contexts_of
from nanovllm.engine.run.graphs import Capture
from nanovllm.engine.run.step_inputs import PrefillInputs
from nanovllm.engine.run.transfer import Array, upload_ahead
from nanovllm.layers.context import NOTHING, Context

# At most a third of a step's tokens are padding, but for the smallest ones.
TOKENS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


class PrefillSize(NamedTuple):
    """T tokens of fewer than S sequences: the last one is unused, and has the padding's rows."""

    num_tokens: int
    num_seqs: int


def sizes_up_to(num_running: int) -> list[PrefillSize]:
    """The sizes to capture where at most `num_running` sequences run.

    A quarter of the tokens may be sequences of their own, such as decoding ones.
    """
    return [PrefillSize(tokens, 1 + min(num_running, max(8, tokens // 4))) for tokens in TOKENS]


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
        ends = size.num_seqs + 1
        ids, positions, slots, rows, needed, *words = torch.split(
            memory, lengths_of(size, num_groups)
        )
        q_ends, k_ends = (part.view(torch.int32)[:ends] for part in words)
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
    tokens, seqs = size
    ends = seqs // 2 + 1
    return [tokens, tokens, num_groups * tokens, seqs, seqs, ends, ends]


class PrefillGraphs:
    """The model for every size. A prefill runs in the next larger one, padded.

    Padding is stored nowhere, and belongs to no sequence. The attention backend must write zeros to
    its rows: other layers compute them as any row, and no row depends on others.
    """

    def __init__(
        self, forward: Forward, table: DeviceTable, num_groups: int, sizes: list[PrefillSize]
    ) -> None:
        self.forward, self.table, self.num_groups, self.sizes = forward, table, num_groups, sizes
        self.graphs: dict[PrefillSize, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        device = table.block_tables.device
        self._device, self._memories = device, {}
        for size in sizes:
            hosts = []
            for _ in range(BUFFERS):
                host = self._memory(size, pin_memory=device.type == "cuda")
                hosts.append((host, PaddedArrays.of(host, size, num_groups)))
            memory = self._memory(size, device=device)
            arrays = PaddedArrays.of(memory, size, num_groups)
            arrays.slots.fill_(-1)
            self._memories[size] = cycle(hosts), memory, arrays

    def _memory(self, size: PrefillSize, **options: object) -> torch.Tensor:
        words = sum(lengths_of(size, self.num_groups))
        return torch.zeros(words, dtype=torch.long, **options)  # type: ignore[call-overload, no-any-return]

    def capture(self, capture: Capture) -> None:
        """Capture every size, largest first."""
        for size in reversed(self.sizes):
            self.graphs[size] = capture(functools.partial(self.run, size))

    def release(self) -> None:
        """Free the captured graphs, even if this object is still referenced."""
        for graph, _ in self.graphs.values():
            graph.reset()
        self.graphs.clear()

    def fitting(self, num_tokens: int, num_seqs: int, num_needed: int) -> PrefillSize | None:
        """The smallest size for so many tokens, sequences and hidden states, if there is one."""
        most = max(num_seqs + 1, num_needed)
        fitting = (s for s in self.sizes if num_tokens <= s.num_tokens and most <= s.num_seqs)
        return next(fitting, None)

    def hidden(self, prefill: PrefillInputs, needed: Array) -> torch.Tensor | None:
        """The hidden states of the tokens `needed`, or None if no size fits the prefill.

        The next replay overwrites them.
        """
        size = self.fitting(len(prefill.input_ids), len(prefill.table_rows), len(needed))
        if size is None:
            return None
        hosts, memory, arrays = self._memories[size]
        host, host_arrays = next(hosts)
        host_arrays.fill(prefill, needed, self.table.layout.unused_row)
        memory.copy_(host, non_blocking=True)
        pending = prefill.pending()
        if len(pending[0]):
            self.table.share()
            uploaded = upload_ahead(self._device, *pending)
            arrays.input_ids.copy_(self.table.fill_pending(arrays.input_ids, *uploaded))
        if size in self.graphs:
            graph, hidden = self.graphs[size]
            graph.replay()
        else:
            hidden = self.run(size)
        return hidden[: len(needed)]

    def run(self, size: PrefillSize) -> torch.Tensor:
        """Compute the hidden states of a size's arrays."""
        *_, arrays = self._memories[size]
        tables: list[torch.Tensor | None] = [
            table.index_select(0, arrays.table_rows)
            for table in self.table.block_tables[: self.num_groups]
        ]
        context = Context(
            is_prefill=True,
            slot_mapping=arrays.slots[0],
            cu_seqlens_q=arrays.q_ends,
            cu_seqlens_k=arrays.k_ends,
            max_seqlen_q=size.num_tokens,
            max_seqlen_k=self.table.layout.max_blocks * self.table.layout.block_size,
            block_tables=tables[0],
        )
        contexts = contexts_of(context, arrays.slots[1:], tables[1:])
        read = arrays.input_ids, arrays.positions, contexts, NOTHING, arrays.needed
        return self.forward(*read)[0]
