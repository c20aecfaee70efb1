"""Decode steps captured as CUDA graphs, once for each of a ladder of batch sizes.

A graph is the whole step: what is read off the rows, model, logits, the draw, and the tokens left
for the next step. Where there is no CUDA, replaying a size is calling it, so that everything but
the capture itself runs, and is tested, anywhere.
"""

import bisect
from collections.abc import Callable
from typing import NamedTuple

import torch


def batch_ladder(largest: int) -> list[int]:
    """Sizes to capture: 1, 2, 4, 8, then every 16, and `largest` itself at the top.

    From 128 to 256 it is every 8: there large layers become bound by what they multiply, padding
    too.
    """
    sizes = (1, 2, 4, 8, *range(16, 128, 16), *range(128, 256, 8), *range(256, largest, 16))
    return [size for size in sizes if size < largest] + [largest]


class Computed(NamedTuple):
    """What a step comes to, for each token that is sampled. A graph's may be padded."""

    logits: torch.Tensor  # [B, V], whole on rank 0 alone
    rows: torch.Tensor  # [B] in int64: where the tokens go
    choices: tuple[torch.Tensor, torch.Tensor] | None = None  # temperatures and keys, if known here
    token_ids: torch.Tensor | None = None  # [B], if they have been drawn

    def first(self, size: int) -> "Computed":
        """Without what is behind so many."""
        return Computed(
            self.logits[:size],
            self.rows[:size],
            self.choices and (self.choices[0][:size], self.choices[1][:size]),
            None if self.token_ids is None else self.token_ids[:size],
        )


class DecodeGraphs:
    """The decode step for every size of a ladder.

    `step` computes as many rows of the batch as it is told, and writes their logits to a buffer
    [B, V]. A batch runs in the next larger size: what is behind it is nobody's rows, which write
    nothing (slot -1) and attend to nothing (context length 0). A batch above the top of the ladder
    is the caller's to run eagerly.
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

        The stream is ours: PyTorch's own for captures belongs to whichever device was first.
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
        """Give up what was captured, whoever still holds this object."""
        for graph, _ in self.graphs.values():
            graph.reset()
        self.graphs.clear()

    def replay(self, num_rows: int) -> Computed:
        """The step of a batch that stands in the rows. The next one overwrites what it returns."""
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
