"""Decode over static buffers, captured as CUDA graphs once for each of a ladder of batch sizes.

Where there is no CUDA, replaying a size is calling the model on that size's slice of the buffers,
so that everything but the capture itself runs, and is tested, anywhere.
"""

import bisect
from collections.abc import Callable

import torch

from nanovllm.utils.context import Context, reset_context, set_context

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def batch_ladder(largest: int) -> list[int]:
    """Sizes to capture: 1, 2, 4, 8, then every 16, and `largest` itself at the top."""
    return [size for size in (1, 2, 4, 8, *range(16, largest, 16)) if size < largest] + [largest]


class DecodeGraphs:
    """The model's decode step for every size of a ladder.

    A batch runs in the next larger size: its padding rows write nothing (slot -1) and attend to
    nothing (context length 0). A batch above the top of the ladder is the caller's to run eagerly.
    """

    def __init__(
        self,
        forward: Forward,
        plan: Callable[[Context], None],
        sizes: list[int],
        max_blocks: int,
        device: torch.device,
    ) -> None:
        self.forward = forward
        self.plan = plan
        self.sizes = sizes
        self.device = device
        top = sizes[-1]
        self.input_ids = torch.zeros(top, dtype=torch.long, device=device)
        self.positions = torch.zeros(top, dtype=torch.long, device=device)
        self.slot_mapping = torch.full((top,), -1, dtype=torch.long, device=device)
        self.context_lens = torch.zeros(top, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(top, max_blocks, dtype=torch.int32, device=device)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

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
                hidden = self.run(size)
            self.graphs[size] = (graph, hidden)

    def release(self) -> None:
        """Give up what was captured, whoever still holds this object."""
        for graph, _ in self.graphs.values():
            graph.reset()
        self.graphs.clear()

    def replay(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """Hidden states [B, hidden] of a decode batch. They are overwritten by the next replay."""
        num_rows = len(input_ids)
        size = self.sizes[bisect.bisect_left(self.sizes, num_rows)]
        self._load(size, input_ids, positions, context)
        if self.graphs:
            graph, hidden = self.graphs[size]
            graph.replay()
        else:
            hidden = self.run(size)
        return hidden[:num_rows]

    def _load(
        self, size: int, input_ids: torch.Tensor, positions: torch.Tensor, context: Context
    ) -> None:
        """Copy a batch into the static buffers and make the rest of `size` rows padding."""
        assert context.context_lens is not None and context.block_tables is not None
        num_rows, num_blocks = context.block_tables.shape
        self.input_ids[:num_rows] = input_ids
        self.positions[:num_rows] = positions
        self.slot_mapping[:num_rows] = context.slot_mapping
        self.slot_mapping[num_rows:size] = -1
        self.context_lens[:num_rows] = context.context_lens
        self.context_lens[num_rows:size] = 0
        self.block_tables[:num_rows, :num_blocks] = context.block_tables

    def run(self, size: int) -> torch.Tensor:
        """Call the model on the first `size` rows of the buffers."""
        context = Context(
            is_prefill=False,
            slot_mapping=self.slot_mapping[:size],
            context_lens=self.context_lens[:size],
            block_tables=self.block_tables[:size],
        )
        self.plan(context)
        set_context(context)
        try:
            return self.forward(self.input_ids[:size], self.positions[:size])
        finally:
            reset_context()
