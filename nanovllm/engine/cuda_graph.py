"""Decode over static buffers, captured as CUDA graphs once for each of a ladder of batch sizes.

A graph is the whole step: model, logits and the draw. Where there is no CUDA, replaying a size is
calling that on the size's slice of the buffers, so that everything but the capture itself runs, and
is tested, anywhere.
"""

import bisect
from collections.abc import Callable
from itertools import cycle

import numpy as np
import torch

from nanovllm.engine.inputs import Array, StepInputs, upload
from nanovllm.utils.context import Context, reset_context, set_context


def batch_ladder(largest: int) -> list[int]:
    """Sizes to capture: 1, 2, 4, 8, then every 16, and `largest` itself at the top.

    From 128 to 256 it is every 8: there large layers become bound by what they multiply, padding
    too.
    """
    sizes = (1, 2, 4, 8, *range(16, 128, 16), *range(128, 256, 8), *range(256, largest, 16))
    return [size for size in sizes if size < largest] + [largest]


class Rows:
    """What a decode step needs of every sequence, in one matrix, which one copy moves."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self.matrix = matrix  # [5, rows] of int64
        self.input_ids, self.positions, self.slot_mapping, self.keys = matrix[:4]
        self.context_lens, other_half = matrix[4].view(torch.int32).chunk(2)
        self.temperatures = other_half.view(torch.float32)

    def fill(self, size: int, inputs: StepInputs, choices: tuple[Array, Array] | None) -> None:
        """Write a batch, and make the rest of `size` rows padding."""
        assert inputs.context_lens is not None
        num_rows = len(inputs.input_ids)
        self.input_ids[:num_rows] = torch.from_numpy(inputs.input_ids)
        self.input_ids[num_rows:size] = 0  # what was there may be no token
        self.positions[:num_rows] = torch.from_numpy(inputs.positions)
        self.slot_mapping[:num_rows] = torch.from_numpy(inputs.slot_mapping)
        self.slot_mapping[num_rows:size] = -1
        self.context_lens[:num_rows] = torch.from_numpy(inputs.context_lens)
        self.context_lens[num_rows:size] = 0
        if choices is not None:
            self.temperatures[:num_rows], self.keys[:num_rows] = map(torch.from_numpy, choices)


Step = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]


class DecodeGraphs:
    """The decode step for every size of a ladder.

    `step` takes input ids, positions, temperatures and keys [B] and a buffer [B, V], writes the
    logits there, and returns token ids [B]. A batch runs in the next larger size: its padding rows
    write nothing (slot -1) and attend to nothing (context length 0). A batch above the top of the
    ladder is the caller's to run eagerly.

    On a GPU rows are written on the host in two copies by turns: before one is written again, an
    event tells that the device has read it. Block tables are uploaded when they have changed.
    """

    def __init__(
        self,
        step: Step,
        plan: Callable[[Context], None],
        sizes: list[int],
        max_blocks: int,
        logits: torch.Tensor,
    ) -> None:
        self.step = step
        self.plan = plan
        self.sizes = sizes
        self.logits = logits
        self.device = device = logits.device
        top = sizes[-1]
        self.rows = Rows(torch.zeros(5, top, dtype=torch.long, device=device))
        self.block_tables = torch.zeros(top, max_blocks, dtype=torch.int32, device=device)
        self.known_tables = np.zeros((top, max_blocks), np.int32)  # what the device has
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        if device.type == "cuda":
            hosts = [torch.zeros(5, top, dtype=torch.long, pin_memory=True) for _ in range(2)]
            self._turns = cycle([(Rows(host), torch.cuda.Event()) for host in hosts])  # type: ignore[no-untyped-call]

    @property
    def max_batch_size(self) -> int:
        """The largest batch that `replay` takes."""
        return self.sizes[-1]

    def capture(self) -> None:
        """Capture every size, largest first, into one memory pool. CUDA only.

        The stream is ours: PyTorch's own for captures belongs to whichever device was first.
        """
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        for size in reversed(self.sizes):
            self.run(size)  # lazy initialization must not happen under capture
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                token_ids = self.run(size)
            self.graphs[size] = (graph, token_ids)

    def release(self) -> None:
        """Give up what was captured, whoever still holds this object."""
        for graph, _ in self.graphs.values():
            graph.reset()
        self.graphs.clear()

    def replay(
        self,
        inputs: StepInputs,
        input_ids: torch.Tensor | None = None,
        choices: tuple[Array, Array] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B, V] and token ids [B] of a decode batch. The next replay overwrites them.

        `input_ids` on the device stand for those of `inputs`; `choices` are the temperatures and
        keys of the draws.
        """
        num_rows = len(inputs.input_ids)
        size = self.sizes[bisect.bisect_left(self.sizes, num_rows)]
        self._load(size, inputs, choices)
        if input_ids is not None:
            self.rows.input_ids[:num_rows] = input_ids
        if self.graphs:
            graph, token_ids = self.graphs[size]
            graph.replay()
        else:
            token_ids = self.run(size)
        return self.logits[:num_rows], token_ids[:num_rows]

    def _load(self, size: int, inputs: StepInputs, choices: tuple[Array, Array] | None) -> None:
        """Write a batch into the static buffers."""
        if self.device.type == "cuda":
            host, was_read = next(self._turns)
            was_read.synchronize()
            host.fill(size, inputs, choices)
            self.rows.matrix.copy_(host.matrix, non_blocking=True)
            was_read.record()
        else:
            self.rows.fill(size, inputs, choices)
        tables = inputs.block_tables
        assert tables is not None
        num_rows, width = tables.shape
        known = self.known_tables[:num_rows, :width]
        if not np.array_equal(known, tables):
            known[:] = -1  # no block: Ctrl-C may strike before both are written
            self.block_tables[:num_rows, :width] = upload(tables, self.device)
            known[:] = tables

    def run(self, size: int) -> torch.Tensor:
        """Call the step on the first `size` rows of the buffers."""
        rows = self.rows
        context = Context(
            is_prefill=False,
            slot_mapping=rows.slot_mapping[:size],
            context_lens=rows.context_lens[:size],
            block_tables=self.block_tables[:size],
        )
        self.plan(context)
        set_context(context)
        try:
            return self.step(
                rows.input_ids[:size], rows.positions[:size], rows.temperatures[:size],
                rows.keys[:size], self.logits[:size],
            )  # fmt: skip
        finally:
            reset_context()
