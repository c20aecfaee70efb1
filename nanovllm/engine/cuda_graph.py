"""Decode steps captured as CUDA graphs, once for each of a ladder of batch sizes.

A graph is the whole step: reading the device table, the model, logits, the draw, and storing the
tokens for the next step. Without CUDA, replaying a size calls the step, so that everything except
the capture runs, and is tested, anywhere.
"""

import bisect
from collections.abc import Callable

import torch

from nanovllm.engine.step.computed import Computed


def batch_ladder(largest: int) -> list[int]:
    """Sizes to capture: 1, 2, 4, 8, then every 16, and `largest` itself at the top.

    From 128 to 256 it is every 8: there large layers become bound by arithmetic, which padding
    adds to.
    """
    sizes = (1, 2, 4, 8, *range(16, 128, 16), *range(128, 256, 8), *range(256, largest, 16))
    return [size for size in sizes if size < largest] + [largest]


class DecodeGraphs:
    """The decode step for every size of a ladder.

    `step(size, out)` computes the first `size` rows of the batch, and writes their logits to `out`.
    A batch runs in the next larger size, padded with unused rows, which write nothing (slot -1) and
    attend to nothing (context length 0). The caller runs batches above the largest size eagerly.
    """

    def __init__(
        self, step: Callable[[int, torch.Tensor], Computed], sizes: list[int], logits: torch.Tensor
    ) -> None:
        self.step = step
        self.sizes = sizes
        self.logits = logits
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Computed]] = {}

    @property
    def max_batch_size(self) -> int:
        """The largest batch that `replay` takes."""
        return self.sizes[-1]

    def capture(self) -> None:
        """Capture every size, largest first, into one memory pool. CUDA only.

        The stream is created here: PyTorch's own stream for captures belongs to the first device.
        """
        device = self.logits.device
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        for size in reversed(self.sizes):
            self.run(size)  # lazy initialization must not happen under capture
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                computed = self.run(size)
            self.graphs[size] = (graph, computed)

    def release(self) -> None:
        """Free the captured graphs, even if this object is still referenced."""
        for graph, _ in self.graphs.values():
            graph.reset()
        self.graphs.clear()

    def replay(self, num_rows: int) -> Computed:
        """Run the step of the table's batch. The next replay overwrites what it returns."""
        size = self.sizes[bisect.bisect_left(self.sizes, num_rows)]
        if self.graphs:
            graph, computed = self.graphs[size]
            graph.replay()
        else:
            computed = self.run(size)
        return computed

    def run(self, size: int) -> Computed:
        """Call the step for the first `size` rows of the batch."""
        return self.step(size, self.logits[:size])
